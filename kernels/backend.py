"""What a device must offer a model besides its linear layers, and which devices there are.

`cpu` is PyTorch's own operations, `cuda` the Triton kernels. Under Triton's interpreter (TRITON_INTERPRET=1) `cuda`
runs without a GPU, its tensors in the CPU's memory: for tests, thousands of times slower than a card.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from appliance.kernels.gated_delta import StateRows

MIN_CAPABILITY = (8, 0)
"""Triton makes tensor-core code from Ampere on."""


class NoDeviceError(Exception):
    """The device asked for cannot be used; the text says why, and what can be done."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Sizes of one layer's cache, [2, num_blocks, num_kv_heads, block_size, head_dim], keys then values."""

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int


class Attention(Protocol):
    """The attention of one step: built once, used by every layer. Rows are decodes first, then prefill chunks."""

    def write(self, cache: Tensor, keys_and_values: Tensor) -> None:
        """Store a step's keys and values, [T, 2 * num_kv_heads, head_dim], keys first, in one layer's cache."""

    def attend(
        self,
        cache: Tensor,
        q: Tensor,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads * head_dim]; softmax in fp32.

        window: how many positions a row attends to, its own included; None for all up to it. scale: of the scores, None
        for 1 / sqrt(head_dim). soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap), None for as they are.
        """


class Backend(Protocol):
    """Where a model computes, and its operations between the matrix multiplies (kernels/reference/layers.py)."""

    name: str
    """cpu or cuda, as kernels know it."""
    device: torch.device
    """Where tensors live."""
    splits_phases: bool
    """Decodes and prefill chunks of a step run one after the other, because their linear layers differ."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """y [M, H] = rms_norm(x) * weight [H]. With a residual [M, H]: residual += x in place, y is the sum's norm.

        Weights of norms, here and in `rope`, may be float32 beside x of 16 bits.
        """

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:
        """Turn x [T, heads, head_dim] in place by cos and sin [T, 1, head_dim] of `RotaryTable.at`.

        norm: weights [heads, head_dim] of an RMSNorm of each head before it is turned.
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """y [M, I] = silu(x[:, :I]) * x[:, I:] of x [M, 2 * I]."""

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """The same with gelu in its tanh form."""

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, rows: StateRows
    ) -> Tensor:
        """o [T, Hv, Dv] float32, and the states of the rows' slots carried on (kernels/gated_delta.py)."""

    def attention(
        self,
        layout: PagedLayout,
        slot_mapping: Tensor,
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        num_decode: int,
    ) -> Attention:
        """The attention of a step of B requests.

        slot_mapping: [T] int64, block * block_size + offset of each row. query_start_loc: B + 1 row offsets;
        seq_lens: B total lengths after the step; block_tables: B lists of block ids. num_decode: how many of the B
        requests are decodes (one row each).
        """


def open_backend(device: str) -> Backend:
    """The backend for `auto`, `cpu` or `cuda`; auto is a usable GPU, else the CPU. Raises NoDeviceError."""
    if device == "cpu" or (device == "auto" and _why_no_gpu() is not None):
        from appliance.kernels.cpu_backend import CpuBackend

        return CpuBackend()
    if importlib.util.find_spec("triton") is None:
        raise NoDeviceError("triton is not installed: install it, or use --device cpu")
    from appliance.kernels.triton_backend import TritonBackend
    from appliance.kernels.triton_common import INTERPRETED

    if INTERPRETED:
        return TritonBackend(torch.device("cpu"))
    reason = _why_no_gpu()
    if reason is None and not (os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")):
        reason = "Triton compiles its launchers with a C compiler and finds none (install gcc, or set CC)"
    if reason is not None:
        raise NoDeviceError(f"{reason}: use --device cpu")
    return TritonBackend(torch.device("cuda", torch.cuda.current_device()))


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU that it can use (is the driver installed, and PyTorch its CUDA build?)"
    found = torch.cuda.get_device_capability()
    if found < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}, "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later is needed"
        )
    return None
