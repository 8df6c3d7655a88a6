"""What the kernels between the matrix multiplies must compute, in plain float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """y [M, H] float32; a residual [M, H] takes up x in place, in its own dtype, and is what is normed."""
    if residual is not None:
        x = residual.copy_(x.float() + residual.float())
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:
    """Turn the first cos.shape[-1] dimensions of x [T, heads, head_dim] in place: halves are the pairs' two sides.

    norm: weights [heads, head_dim] of an RMSNorm of each head before that.
    """
    if norm is not None:
        x[:] = rms_norm(x, norm, eps)
    half = cos.shape[-1] // 2
    angle_cos, angle_sin = cos[..., :half].float(), sin[..., half:].float()
    first, second = x.float()[..., : 2 * half].clone().chunk(2, -1)
    x[..., :half] = first * angle_cos - second * angle_sin
    x[..., half : 2 * half] = second * angle_cos + first * angle_sin


def silu_and_mul(x: Tensor) -> Tensor:
    """y [M, I] float32 of x [M, 2 * I], gate first."""
    gate, up = x.float().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """y [M, I] float32 of x [M, 2 * I], gate first; gelu in its tanh form."""
    gate, up = x.float().chunk(2, -1)
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
