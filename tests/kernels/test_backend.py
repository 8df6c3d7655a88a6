"""Which device `auto`, `cpu` and `cuda` are, and what is said where a card cannot be used."""

from __future__ import annotations

import shutil

import pytest
import torch

from appliance.kernels import triton_common
from appliance.kernels.backend import NoDeviceError, open_backend
from appliance.kernels.cpu_backend import CpuBackend
from appliance.kernels.triton_backend import TritonBackend


def pretend_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, interpreted: bool = False) -> None:
    monkeypatch.setattr(triton_common, "INTERPRETED", interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_auto_without_a_card_is_the_cpu() -> None:
    assert isinstance(open_backend("auto"), CpuBackend)
    assert isinstance(open_backend("cpu"), CpuBackend)


def test_cuda_under_the_interpreter_needs_no_card() -> None:
    found = open_backend("cuda")
    assert isinstance(found, TritonBackend)
    assert (found.name, found.device) == ("cuda", torch.device("cpu"))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_card_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pretend_card(monkeypatch, (8, 9))
    monkeypatch.setenv("CC", "cc")
    assert open_backend(device).device == torch.device("cuda", 0)


def test_without_a_driver_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_common, "INTERPRETED", False)
    with pytest.raises(NoDeviceError, match=r"finds no NVIDIA GPU .*use --device cpu"):
        open_backend("cuda")


def test_an_old_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_card(monkeypatch, (7, 5))
    with pytest.raises(NoDeviceError, match=r"Some Card has compute capability 7\.5, 8\.0 or later is needed"):
        open_backend("cuda")
    assert isinstance(open_backend("auto"), CpuBackend)


def test_a_card_without_a_compiler_is_refused_not_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto does not fall back in silence: who has a card wants it used."""
    pretend_card(monkeypatch, (8, 6))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoDeviceError, match="install gcc"):
        open_backend("auto")
