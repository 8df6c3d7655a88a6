"""Decode of up to 4 bits on a CPU: PyTorch's fused dequantise-matmul, W = (c - 8) * scale + zero.

Facts of the op (ATen native/cpu/int4mm_kernel.cpp, tried): N % 16 == 0, group 32, 64, 128 or 256 that divides K; fast
only with bf16 activations, scales and zeros; a row's result does not depend on M; with a single input that is not zero
the output is W's element, computed in fp32 and rounded to bf16. Dense bf16 wins above about 16 rows.

What the op lacks and pays nothing in exactness is made up for: codes of 2 and 3 bits are stored around the middle of 4
bits, larger groups are repeated, and K and N are padded.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.spec import AffineWeight, LinearSpec, Target

GROUP_SIZES = (32, 64, 128, 256)
_MIDDLE = 8
"""The code that the op takes for zero."""


def run_shape(K: int, group_size: int) -> tuple[int, int] | None:
    """K padded to whole groups of 32, and the largest group of the op that divides it and the layer's own groups (one
    group over all of K has no end to respect). None where the layer's groups begin inside a group of 32.
    """
    rows = -(-K // GROUP_SIZES[0]) * GROUP_SIZES[0]
    own = rows if group_size >= K else group_size
    for size in reversed(GROUP_SIZES):
        if own % size == 0 and rows % size == 0:
            return rows, size
    return None


class Int4Linear:
    """Moves K*N/2 bytes of codes and 4*K*N/group bytes of scales a call."""

    name: ClassVar[str] = "cpu_int4"

    def __init__(self, weight: AffineWeight, dtype: torch.dtype) -> None:
        """Packs a weight whose K and group_size `run_shape` takes, codes below 16."""
        self.K, self.N = weight.codes.shape
        shape = run_shape(self.K, weight.group_size)
        assert shape is not None, f"refuse() lets no group of {weight.group_size} through"
        self.rows, self.group_size = shape
        self.perm = weight.perm
        middle = 1 << int(weight.codes.max()).bit_length() >> 1
        columns = (0, -self.N % 16)
        codes = F.pad(weight.codes + (_MIDDLE - middle), (*columns, 0, self.rows - self.K))
        self.packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.t().contiguous().int(), 1)
        scales = F.pad(weight.scales, columns)
        zeros = F.pad(weight.offsets + middle * weight.scales, columns)
        repeats = -(-min(weight.group_size, self.rows) // self.group_size)  # one group may be said to be beyond K
        self.scales_and_zeros = torch.stack(  # [rows / group, N, 2]
            [part.repeat_interleave(repeats, 0)[: self.rows // self.group_size] for part in (scales, zeros)], -1
        ).to(dtype)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes + (0 if self.perm is None else self.perm.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if self.perm is not None:
            x = x[:, self.perm]
        if self.rows != self.K:
            x = F.pad(x, (0, self.rows - self.K))
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group_size, self.scales_and_zeros)
        return y if y.shape[1] == self.N else y[:, : self.N].contiguous()


def refuse(spec: LinearSpec, target: Target) -> str | None:
    if target.device != "cpu":
        return f"needs a CPU, found {target.device}"
    if not spec.is_quantized:
        return "needs a quantised weight, found a dense one"
    if spec.bits > 4:
        return f"needs codes of at most 4 bits, found {spec.bits}"
    if target.dtype != torch.bfloat16:
        return f"needs bfloat16 activations, found {str(target.dtype).removeprefix('torch.')}"
    if run_shape(spec.K, spec.group_size) is None:
        return f"needs groups of a multiple of {GROUP_SIZES[0]} rows or one over all of K, found {spec.group_size}"
    return None


def pack(weight: AffineWeight | Tensor, dtype: torch.dtype) -> Int4Linear:
    assert not isinstance(weight, Tensor), "refuse() lets no dense weight through"
    return Int4Linear(weight, dtype)
