"""SwiGLU's activation, silu(gate) * up, in Triton. Run interpreted and compiled offline only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance.kernels.triton_common import jit

BLOCK = 1024


@jit
def silu_and_mul_kernel(
    y_ptr: tl.tensor, x_ptr: tl.tensor, size: tl.tensor, stride_x: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """BLOCK outputs of one row of `size`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x_ptrs = x_ptr + row * stride_x + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + size, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * size + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """y [M, I] = silu(x[:, :I]) * x[:, I:] in x's dtype of x [M, 2 * I], gate first; computed in float32."""
    M, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    y = torch.empty((M, size), dtype=x.dtype, device=x.device)
    if M:
        silu_and_mul_kernel[(M, triton.cdiv(size, BLOCK))](y, x, size, x.stride(0), BLOCK=BLOCK)
    return y
