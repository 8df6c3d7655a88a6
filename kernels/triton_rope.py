"""Rotary position embedding in place, half-split form, after an optional norm of each head, in Triton.

Run interpreted and compiled offline only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from appliance.kernels.triton_common import jit


@jit
def rope_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    stride_token: tl.tensor,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One token: its HEADS rows padded to ROWS, HALF pairs each padded to DIMS."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    in_half = dims < HALF
    table = token * (2 * HALF) + dims
    cos = tl.load(cos_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + HALF + table, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first_ptrs = x_ptr + token * stride_token + heads[:, None] * HEAD_DIM + dims[None, :]
    mask = (heads < HEADS)[:, None] & in_half[None, :]
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        norm_ptrs = norm_ptr + heads[:, None] * HEAD_DIM + dims[None, :]
        first *= scale * tl.load(norm_ptrs, mask=mask, other=0.0).to(tl.float32)
        second *= scale * tl.load(norm_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptrs, (first * cos - second * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(first_ptrs + HALF, (second * cos + first * sin).to(x_ptr.dtype.element_ty), mask=mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:
    """Turn x [T, heads, head_dim] in place, q and k heads together; a token's heads lie in a row. Computed in float32.

    cos, sin: [T, 1, rotary_dim] as `RotaryTable.at` gives them, contiguous: halves repeated, sin negated in the first.
    Dimensions from rotary_dim on stay as they are. norm: weights [heads, head_dim], contiguous, of an RMSNorm of each
    head before it is turned; then all dimensions must turn.
    """
    tokens, heads, head_dim = x.shape
    rotary_dim = cos.shape[-1]
    assert x.stride()[1:] == (head_dim, 1)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert rotary_dim <= head_dim
    if norm is not None:
        assert norm.shape == (heads, head_dim), f"norm is [{heads}, {head_dim}], not {list(norm.shape)}"
        assert norm.is_contiguous()
        assert rotary_dim == head_dim, "a head is normed whole"
    if tokens == 0:
        return
    rope_kernel[(tokens,)](
        x,
        cos,
        sin,
        x if norm is None else norm,
        eps,
        x.stride(0),
        HAS_NORM=norm is not None,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        ROWS=triton.next_power_of_2(heads),
        DIMS=triton.next_power_of_2(rotary_dim // 2),
    )
