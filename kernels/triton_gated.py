"""Activations of gated MLPs in Triton: silu(gate) * up, gelu(gate) * up. Run interpreted and compiled offline only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance.kernels.triton_common import jit

BLOCK = 1024


@jit
def gated_kernel(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    size: tl.tensor,
    stride_x: tl.tensor,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK outputs of one row of `size`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x_ptrs = x_ptr + row * stride_x + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + size, mask=mask, other=0.0).to(tl.float32)
    slope = gate
    if IS_GELU:  # 1 + tanh(z) is 2 * sigmoid(2 * z), with z = sqrt(2 / pi) * (gate + 0.044715 * gate^3)
        slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        slope = tl.maximum(slope, -80.0)  # beyond, the exponential overflows and the answer is 0 either way
    y = gate * tl.sigmoid(slope) * up
    tl.store(y_ptr + row * size + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """y [M, I] = silu(x[:, :I]) * x[:, I:] in x's dtype of x [M, 2 * I], gate first; computed in float32."""
    return _gated(x, is_gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    """The same with gelu in its tanh form."""
    return _gated(x, is_gelu=True)


def _gated(x: Tensor, *, is_gelu: bool) -> Tensor:
    M, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    y = torch.empty((M, size), dtype=x.dtype, device=x.device)
    if M:
        gated_kernel[(M, triton.cdiv(size, BLOCK))](y, x, size, x.stride(0), IS_GELU=is_gelu, BLOCK=BLOCK)
    return y
