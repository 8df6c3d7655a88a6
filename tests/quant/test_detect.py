"""Which format is found: by tensors first; formats not served are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.writers import MODULE, gptq_tensors, pack, random_integers, write_folder


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


HALF = torch.ones(4, 64).half()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_plain_tensors_come_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 4).to(dtype)
    checkpoint = open_checkpoint(write_folder(tmp_path, {f"{MODULE}.weight": weight}))
    read = checkpoint.linear(MODULE)
    assert isinstance(read, Tensor)
    assert read.dtype == dtype
    assert torch.equal(read, weight)
    assert checkpoint.report.bits == 0
    assert checkpoint.report.describe() == f"safetensors, not quantised ({str(dtype).removeprefix('torch.')})"
    assert checkpoint.has_module(MODULE)
    assert not checkpoint.has_module("lm_head")
    assert not checkpoint.has("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"holds no tensor lm_head\.weight"):
        checkpoint.tensor("lm_head.weight")


def test_tensors_outlive_a_closed_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, {f"{MODULE}.weight": torch.ones(6, 4)}))
    weight = checkpoint.tensor(f"{MODULE}.weight")
    checkpoint.close()
    assert torch.equal(weight, torch.ones(6, 4))


def write_shards(folder: Path) -> Path:
    write_folder(folder, {"stray.weight": torch.zeros(1)})  # a model.safetensors beside shards is ignored
    parts = {"model-00001.safetensors": "a.weight", "model-00002.safetensors": "b.weight"}
    for number, (file_name, name) in enumerate(parts.items()):
        save_file({name: torch.full((2, 2), float(number))}, folder / file_name)
    index = {"weight_map": {name: file_name for file_name, name in parts.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_of_an_index_are_one_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_shards(tmp_path))
    assert checkpoint.names() == ["a.weight", "b.weight"]
    assert torch.equal(checkpoint.tensor("b.weight"), torch.ones(2, 2))


def test_a_cache_of_links_to_blobs_outside_the_folder_is_read(tmp_path: Path) -> None:
    snapshot, blobs = write_shards(tmp_path / "snapshots" / "1"), tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert open_checkpoint(snapshot).names() == ["a.weight", "b.weight"]


@pytest.mark.parametrize("file_name", ["model.safetensors", "gptq_model-4bit-128g.safetensors"])
def test_a_single_file_may_have_any_name(tmp_path: Path, file_name: str) -> None:
    write_folder(tmp_path, {"a.weight": torch.ones(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / file_name)
    assert open_checkpoint(tmp_path).names() == ["a.weight"]


@pytest.mark.parametrize("method", [None, "gptq", "awq"])
def test_awq_is_told_from_gptq_without_g_idx_by_its_shapes(tmp_path: Path, method: str | None) -> None:
    codes, zeros, scales = random_integers(128, 64, 4)
    quantization = None if method is None else {"quant_method": method, "bits": 4, "group_size": 32}
    awq = {f"{MODULE}.qweight": int32(128, 8), f"{MODULE}.qzeros": int32(4, 8), f"{MODULE}.scales": HALF}
    for name, tensors in (("gptq", gptq_tensors(codes, pack(zeros, 1), scales, None)), ("awq", awq)):
        folder = write_folder(tmp_path / name, tensors, quantization)
        if method in (None, name):
            assert open_checkpoint(folder).report.format == name
        else:
            with pytest.raises(CheckpointError, match=f"says quant_method {method}, but .* has the layout of {name}"):
                open_checkpoint(folder)


def test_awq_without_zero_points_is_symmetric(tmp_path: Path) -> None:
    tensors = {f"{MODULE}.qweight": int32(128, 8), f"{MODULE}.scales": HALF}
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, {"quant_method": "awq", "zero_point": False}))
    weight = checkpoint.linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), torch.full((64, 128), -8.0))
    assert checkpoint.report.symmetric


@pytest.mark.parametrize(
    ("tensors", "quantization", "said"),
    [
        ({f"{MODULE}.weight": int32(8, 8)}, None, "dtype torch.int32 and no known quantisation"),
        ({f"{MODULE}.qweight": int32(8, 128), f"{MODULE}.scales": HALF}, None, "AWQ's marlin layout"),
        (
            {f"{MODULE}.qweight": int32(8, 64), f"{MODULE}.scales": HALF, f"{MODULE}.qzeros": int32(4, 8)},
            {"quant_method": "gptq", "format": "bitblas"},
            "GPTQ format 'bitblas'",
        ),
    ],
)
def test_formats_not_served_are_named_with_those_that_are(
    tmp_path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, said: str
) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        open_checkpoint(write_folder(tmp_path, tensors, quantization))
    assert said in raised.value.message
    assert "gptq" in raised.value.message.lower()


@pytest.mark.parametrize(
    ("tensors", "quantization", "said"),
    [
        (
            {f"{MODULE}.weight": HALF},
            {"quant_method": "gptq", "bits": 4},
            "says quant_method gptq, 4 bits, but no tensor",
        ),
        ({f"{MODULE}.qweight": int32(9, 9), f"{MODULE}.scales": HALF}, None, "fit neither GPTQ"),
        ({f"{MODULE}.qweight": int32(9), f"{MODULE}.scales": HALF}, None, "matrices were expected"),
        (
            {f"{MODULE}.qweight": int32(128, 8), f"{MODULE}.scales": HALF},
            {"quant_method": "awq", "bits": 8},
            "says 8 bits, but",
        ),
        (
            {f"{MODULE}.qweight": int32(128, 8), f"{MODULE}.scales": HALF},
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            "group_size 128, which makes 1 groups of the 128 inputs",
        ),
        (
            {f"{MODULE}.qweight": int32(128, 8), f"{MODULE}.scales": HALF, f"{MODULE}.qzeros": int32(4, 9)},
            None,
            "qzeros in model.safetensors is torch.int32 [4, 9], torch.int32 [4, 8] was expected",
        ),
        ({f"{MODULE}.B": int32(8, 8), f"{MODULE}.s": HALF}, None, "Marlin's layout needs B int32 [K/16, 2N]"),
        (
            {f"{MODULE}.B": int32(8, 128), f"{MODULE}.s": HALF[:1]},
            {"quant_method": "gptq", "bits": 8, "is_marlin_format": True},
            "says gptq, 8 bits, but model.layers.0.mlp.up_proj.B is in Marlin's layout",
        ),
        ({"model.buffer": HALF}, None, "no tensor named *.weight"),
    ],
)
def test_contradictions_are_errors_that_name_both_sides(
    tmp_path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, said: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(write_folder(tmp_path, tensors, quantization))
    assert said in raised.value.message


def test_modules_of_two_formats_are_refused(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(128, 64, 4)
    gptq = gptq_tensors(codes, pack(zeros, 1), scales, None)
    marlin = {"c.B": int32(8, 128), "c.s": HALF}
    with pytest.raises(CheckpointError, match=r"c has Marlin's layout, model\..* has words in qweight"):
        open_checkpoint(write_folder(tmp_path, gptq | marlin))
    tensors = gptq | {"b.qweight": int32(128, 8), "b.qzeros": int32(4, 8), "b.scales": HALF}
    with pytest.raises(CheckpointError, match=r"b has the layout of awq gemm, model\..* that of gptq"):
        open_checkpoint(write_folder(tmp_path, tensors))
