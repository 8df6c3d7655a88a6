"""4-bit decode on a CPU: PyTorch's fused dequantise-matmul, W = (code - 8) * scale + zero.

Facts of the op (ATen native/cpu/int4mm_kernel.cpp, tried): N % 16 == 0, group 32, 64, 128 or 256; fast only with bf16
activations, scales and zeros; a row's result does not depend on M. Dense bf16 wins above about 16 rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from appliance.kernels.spec import AffineWeight, LinearSpec, Target

GROUP_SIZES = (32, 64, 128, 256)


def run_group_size(spec: LinearSpec) -> int | None:
    """The group the op runs with: the layer's own, or the largest supported one that divides it (scales repeated)."""
    for size in reversed(GROUP_SIZES):
        if spec.group_size % size == 0 and spec.K % size == 0:
            return size
    return None


class Int4Linear:
    """Moves K*N/2 bytes of codes and 4*K*N/group bytes of scales a call."""

    name: ClassVar[str] = "cpu_int4"

    def __init__(self, packed: Tensor, scales_and_zeros: Tensor, group_size: int, perm: Tensor | None) -> None:
        self.packed = packed  # [N, K/2] uint8 in the op's own tiling
        self.scales_and_zeros = scales_and_zeros  # [K/group, N, 2] bf16
        self.group_size = group_size
        self.perm = perm

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes + (0 if self.perm is None else self.perm.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if self.perm is not None:
            x = x[:, self.perm]
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group_size, self.scales_and_zeros)
        return y


def refuse(spec: LinearSpec, target: Target) -> str | None:
    if target.device != "cpu":
        return f"runs on cpu, not on {target.device}"
    if spec.bits != 4:
        return f"needs 4-bit codes, the layer has {spec.bits} bits"
    if target.dtype != torch.bfloat16:
        return f"needs bfloat16 activations, not {str(target.dtype).removeprefix('torch.')}"
    if spec.N % 16:
        return f"needs N divisible by 16, found {spec.N}"
    if run_group_size(spec) is None:
        return (
            f"needs a group of {', '.join(map(str, GROUP_SIZES))} or a multiple that divides K, found {spec.group_size}"
        )
    return None


def pack(weight: AffineWeight | Tensor, dtype: torch.dtype) -> Int4Linear:
    assert not isinstance(weight, Tensor), "refuse() lets no dense weight through"
    K, N = weight.codes.shape
    spec = LinearSpec(K, N, 4, weight.group_size)
    group_size = run_group_size(spec)
    assert group_size is not None, f"refuse() lets no group of {weight.group_size} through"
    codes = weight.codes.t().contiguous().int()  # [N, K], the op's orientation
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    repeats = weight.group_size // group_size
    scales = weight.scales.repeat_interleave(repeats, 0)[: K // group_size]
    zeros = (weight.offsets + 8.0 * weight.scales).repeat_interleave(repeats, 0)[: K // group_size]
    return Int4Linear(packed, torch.stack([scales, zeros], -1).to(dtype), group_size, weight.perm)
