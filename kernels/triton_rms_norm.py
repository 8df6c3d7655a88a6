"""RMSNorm with an optional residual addition, in Triton. Run interpreted and compiled offline only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance.kernels.triton_common import jit


@jit
def rms_norm_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    eps: tl.tensor,
    stride_x: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """One row of SIZE."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row * SIZE + columns
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
        # The norm sees the sum as it is stored, so that a fused step equals an unfused one.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptrs, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * SIZE + columns, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """y [M, H] = rms_norm(x) * weight [H], in x's dtype, computed in float32; x [M, H], its last dimension contiguous.

    With a residual [M, H], contiguous: residual += x in place first, and y is the norm of that sum.
    """
    M, size = x.shape
    assert x.stride(1) == 1
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    y = torch.empty((M, size), dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(M,)](
        y,
        x,
        weight,
        y if residual is None else residual,
        eps,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
    return y
