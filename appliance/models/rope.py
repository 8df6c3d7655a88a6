"""Rotary position embedding, half-split form. Source of the scaling rules: transformers 5.24 modeling_rope_utils.

A head that turns in part, or by pairs of neighbours, is made one that turns whole and by halves: its dimensions are put
in another order when q and k are read, and those that do not turn get a frequency of 0. Scores are sums over dimensions
and do not see their order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from appliance.kernels.spec import CPU
from appliance.models.rope_config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling


def head_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """[head_dim]: which dimension of the checkpoint's heads each of ours is; None where they are the same."""
    if rope.rotary_dim is None and not rope.is_interleaved:
        return None
    turning, still = torch.arange(head_dim).tensor_split([rope.rotary_dim or head_dim])
    if rope.is_interleaved:
        turning = turning.view(-1, 2).t().flatten()
    sides = zip(turning.chunk(2), still.tensor_split(2), strict=True)
    return torch.cat([part for side in sides for part in side])


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """[head_dim / 2] float32, 0 for those that do not turn. max_position: longest context that is served."""
    rotary_dim = rope.rotary_dim or head_dim
    turning = _scaled_frequencies(rope, rotary_dim, max_position)
    return torch.cat([turning, torch.zeros((head_dim - rotary_dim) // 2)])


def _scaled_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies = 1.0 / powers
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case LongRopeScaling() as scaling:
            factors = scaling.long if max_position > scaling.original_max_position else scaling.short
            return 1.0 / (torch.tensor(factors) * powers)
        case Llama3Scaling() as scaling:
            wavelength = 2 * math.pi / frequencies
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept = ((scaling.original_max_position / wavelength - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
        case YarnScaling() as scaling:
            kept = 1 - _yarn_ramp(scaling, rope.theta, head_dim)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn_ramp(scaling: YarnScaling, theta: float, head_dim: int) -> Tensor:
    """[head_dim / 2]: how far each frequency is slowed down, 0 not at all, 1 by the whole factor."""

    def dimension_of(turns: float) -> float:
        """The dimension, not whole, whose frequency makes so many turns in the original context."""
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(head_dim // 2).float() - low) / width).clamp(0.0, 1.0)


class RotaryTable:
    """cos and sin of every position that is served, ready to multiply: sin carries the sign of the half it lands on."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_position: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rope, head_dim, max_position))
        cos, sin = angles.cos(), angles.sin()
        if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
            turning = (rope.rotary_dim or head_dim) // 2
            cos[:, :turning] *= rope.scaling.attention_factor
            sin[:, :turning] *= rope.scaling.attention_factor
        self.cos = torch.cat([cos, cos], -1).to(device, dtype)  # [P, head_dim]
        self.sin = torch.cat([-sin, sin], -1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] of positions [T], to be shared by all layers of a step."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(0, positions).unsqueeze(1)
