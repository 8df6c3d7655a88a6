"""Rotary position embedding, half-split form, with the frequencies of Llama 2 and Llama 3.1.

Source of the llama3 rule: transformers modeling_rope_utils (wavelengths beyond the original context are slowed down by
`factor`, short ones kept, a linear blend between).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from appliance.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "default":
        return frequencies
    wavelength = 2 * math.pi / frequencies
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = ((rope.original_max_position / wavelength - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


class RotaryTable:
    """cos and sin of every position, ready to multiply: sin carries the sign of the half it lands on."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rope, head_dim))
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat([cos, cos], -1).to(dtype)  # [P, head_dim]
        self.sin = torch.cat([-sin, sin], -1).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] of positions [T], to be shared by all layers of a step."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] turned by its positions; swapping halves and signing sin is rotate_half in one op less."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin)
