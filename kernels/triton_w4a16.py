"""Fused dequantise-matmul of 4-bit weights and 16-bit activations, as two Triton kernels.

A nibble becomes a float without arithmetic: masked out of its word and joined with the bits of a power of two whose
last places it fills, so that the float is `base + q`. Nothing is subtracted per weight; a group's product starts at
minus what the bases (and a symmetric zero point) will add, and is scaled once when the group ends:

    y[m, n] = sum over groups g of  scales[g, n] * (sum_k (base_k + q[k, n]) * x[m, k] - correction[g, m])
                                  + offsets[g, n] * sums[g, m]

The first kernel makes `correction` and `sums`, the second multiplies. Sums are fp32 throughout. Run under Triton's
interpreter and compiled offline only: the tiles are not tuned, and nothing was measured on a GPU.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance.kernels.triton_common import INTERPRETED, constexpr_function, dot, jit
from appliance.kernels.w4a16_pack import ONE_GROUP, SYMMETRIC_ZERO, TILE, PackedW4

# (right shift, mask, bits of the base) of nibble j in a 16-bit lane; two lanes share a 32-bit register. fp16: bases
# 1024, 64, 256 and 16 put the nibble where it already is, or is after one shift by 6. bf16: base 128.
FP16_NIBBLES = ((0, 0x000F, 0x6400), (0, 0x00F0, 0x5400), (6, 0x003C, 0x5C00), (6, 0x03C0, 0x4C00))
BF16_NIBBLES = ((0, 0x000F, 0x4300), (4, 0x000F, 0x4300), (8, 0x000F, 0x4300), (12, 0x000F, 0x4300))
FP16_BASES = (1024.0, 64.0, 256.0, 16.0)
BF16_BASE = 128.0


@constexpr_function
def shift_of(is_bf16: bool, j: int) -> int:
    return (BF16_NIBBLES if is_bf16 else FP16_NIBBLES)[j][0]


@constexpr_function
def mask_of(is_bf16: bool, j: int) -> int:
    return (BF16_NIBBLES if is_bf16 else FP16_NIBBLES)[j][1]


@constexpr_function
def magic_of(is_bf16: bool, j: int) -> int:
    return (BF16_NIBBLES if is_bf16 else FP16_NIBBLES)[j][2]


@constexpr_function
def base_of(is_bf16: bool, j: int) -> float:
    return BF16_BASE if is_bf16 else FP16_BASES[j]


@constexpr_function
def ptx_of(is_bf16: bool, j: int) -> str:
    """Two lanes at once; 0xEA is (a & b) | c."""
    shift, mask, magic = (BF16_NIBBLES if is_bf16 else FP16_NIBBLES)[j]
    logic = f"lop3.b32 $0, {{source}}, {mask * 0x00010001:#010x}, {magic * 0x00010001:#010x}, 0xEA;"
    if shift == 0:
        return logic.format(source="$1")
    return f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; {logic.format(source='t')} }}"


@jit
def _unpack(words: tl.tensor, J: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """base + q of nibble J of int16 words, exact in their 16-bit float."""
    if INTERPRETED:
        bits = (words.to(tl.int32) & 0xFFFF) >> shift_of(IS_BF16, J)
        bits = ((bits & mask_of(IS_BF16, J)) | magic_of(IS_BF16, J)).to(tl.int16)
        return bits.to(tl.bfloat16 if IS_BF16 else tl.float16, bitcast=True)
    elif IS_BF16:
        return tl.inline_asm_elementwise(ptx_of(IS_BF16, J), "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ptx_of(IS_BF16, J), "=r,r", [words], tl.float16, is_pure=True, pack=2)


@jit
def group_sums_kernel(
    correction_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    x_ptr: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    groups: tl.tensor,
    stride_x: tl.tensor,
    stride_m: tl.tensor,
    SLICES: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row and BLOCK slices of 32 inputs; SLICES slices make a group. Rows past M repeat the last."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    slices = part * BLOCK + tl.arange(0, BLOCK)
    inputs = slices[:, None] * 32 + tl.arange(0, 32)[None, :]
    x_row = tl.minimum(row, M - 1).to(tl.int64) * stride_x
    x = tl.load(x_ptr + x_row + inputs, mask=inputs < K, other=0.0)
    sums = tl.sum(x.to(tl.float32), 1)
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    nibble = slices % 4
    base = tl.where(nibble == 0, base_of(IS_BF16, 0), base_of(IS_BF16, 1))
    base = tl.where(nibble == 2, base_of(IS_BF16, 2), base)
    base = tl.where(nibble == 3, base_of(IS_BF16, 3), base)
    group = part * (BLOCK // SLICES) + tl.arange(0, BLOCK // SLICES)
    target = group * stride_m + row
    correction = tl.sum(tl.reshape(sums * (base + ZERO), (BLOCK // SLICES, SLICES)), 1)
    tl.store(correction_ptr + target, correction, mask=group < groups)
    if HAS_OFFSETS:
        tl.store(sums_ptr + target, tl.sum(tl.reshape(sums, (BLOCK // SLICES, SLICES)), 1), mask=group < groups)


@jit
def w4a16_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride_x: tl.tensor,
    stride_n: tl.tensor,
    stride_m: tl.tensor,
    SLICES: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One tile [BLOCK_M, BLOCK_N] of y. stride_n is N padded to 128, stride_m is M padded to BLOCK_M.

    Rows past M compute the last row again and are not stored, so the loop masks nothing unless K has a tail.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, 32)
    x_ptrs = x_ptr + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * stride_x + inputs[None, :]
    # A tile of 128 columns is 32 * 128 words in a row.
    words_ptrs = words_ptr + ((columns // 128) * 4096 + columns % 128)[None, :] + inputs[:, None] * 128
    scales_ptrs = scales_ptr + columns
    offsets_ptrs = offsets_ptr + columns
    correction_ptrs = correction_ptr + rows
    sums_ptrs = sums_ptr + rows
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for block in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
        words = tl.load(words_ptrs, eviction_policy="evict_first")
        for j in tl.static_range(4):
            if EVEN_K:
                x = tl.load(x_ptrs + 32 * j)
            else:
                x = tl.load(x_ptrs + 32 * j, mask=(block * 128 + 32 * j + inputs < K)[None, :], other=0.0)
            if j % SLICES == 0:
                product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) - tl.load(correction_ptrs)[:, None]
                correction_ptrs += stride_m
            product = dot(x, _unpack(words, j, IS_BF16), product)
            if j % SLICES == SLICES - 1:
                if ONE_SCALE:
                    accumulator += product
                else:
                    accumulator += product * tl.load(scales_ptrs)[None, :]
                    scales_ptrs += stride_n
                if HAS_OFFSETS:
                    if ONE_SCALE:
                        total += tl.load(sums_ptrs)
                    else:
                        accumulator += tl.load(sums_ptrs)[:, None] * tl.load(offsets_ptrs)[None, :]
                        offsets_ptrs += stride_n
                    sums_ptrs += stride_m
        x_ptrs += 128
        words_ptrs += stride_n * 32
    if ONE_SCALE:
        accumulator *= tl.load(scales_ptrs)[None, :]
        if HAS_OFFSETS:
            accumulator += total[:, None] * tl.load(offsets_ptrs)[None, :]
    in_range = columns < N
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=in_range, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(y_ptrs, accumulator.to(y_ptr.dtype.element_ty), mask=(rows < M)[:, None] & in_range[None, :])


SUMS_BLOCK = 64
"""Slices of 32 inputs that one program of the first kernel sums."""


def tile_for(M: int, slices: int, even_k: bool) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps and stages for M rows. Not tuned; chosen so that no loop spills registers.

    Groups below 128 keep more products alive at once, and a tail of K its masks: 64 rows fit only without either.
    """
    block_n = 128 if slices == 4 else 64
    if M <= 16:
        return 16, block_n, 4, 4
    if M <= 32 or slices < 4 or not even_k:
        return 32, block_n, 4, 4
    return 64, block_n, 4, 3


def w4a16(x: Tensor, weight: PackedW4, bias: Tensor | None = None) -> Tensor:
    """y [M, N] in x's dtype of x [M, K] float16 or bfloat16, its last dimension contiguous, and a bias [N] or None.

    The caller has permuted x where the weight has a `perm`. Sums are float32; M and N are any, K is the weight's.
    """
    assert x.ndim == 2, f"x is [M, K], not {tuple(x.shape)}"
    M, K = x.shape
    assert weight.K == K, f"x has {K} inputs, the weight {weight.K}"
    assert x.stride(1) == 1, "x is contiguous along K"
    assert x.dtype in (torch.float16, torch.bfloat16), f"x is a 16-bit float, not {x.dtype}"
    y = x.new_empty(M, weight.N)
    if M == 0:
        return y
    slices = (TILE if weight.group_size == ONE_GROUP else weight.group_size) // 32
    even_k = K % TILE == 0
    block_m, block_n, warps, stages = tile_for(M, slices, even_k)
    stride_m = triton.cdiv(M, block_m) * block_m
    k_blocks, n_tiles = weight.words.shape[:2]
    groups = k_blocks * 4 // slices
    has_offsets = weight.offsets is not None
    correction = x.new_empty((2 if has_offsets else 1, groups, stride_m), dtype=torch.float32)
    sums = correction[-1]
    group_sums_kernel[(stride_m, triton.cdiv(groups * slices, SUMS_BLOCK))](
        correction,
        sums,
        x,
        M,
        K,
        groups,
        x.stride(0),
        stride_m,
        SLICES=slices,
        ZERO=0 if has_offsets else SYMMETRIC_ZERO,
        HAS_OFFSETS=has_offsets,
        BLOCK=SUMS_BLOCK,
    )
    w4a16_kernel[(triton.cdiv(M, block_m), n_tiles * TILE // block_n)](
        y,
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        correction,
        sums,
        y if bias is None else bias,
        M,
        weight.N,
        K,
        x.stride(0),
        n_tiles * TILE,
        stride_m,
        SLICES=slices,
        ONE_SCALE=weight.group_size == ONE_GROUP,
        HAS_OFFSETS=has_offsets,
        HAS_BIAS=bias is not None,
        EVEN_K=even_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )
    return y


class TritonW4A16Linear:
    """Moves K*N/2 bytes of codes and 4*N bytes a group of scales (and offsets) a call, whatever M up to a tile."""

    name: ClassVar[str] = "triton_w4a16"

    def __init__(self, weight: PackedW4) -> None:
        self.weight = weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.perm is not None:
            x = x[:, self.weight.perm]
        return w4a16(x, self.weight)
