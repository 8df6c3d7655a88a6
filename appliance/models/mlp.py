"""The feed-forward block of a decoder layer: y = down(activate(gate(x), up(x)))."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from appliance.models.weights import WeightReader


class Mlp:
    """Tensors: prefix.{gate,up,down}_proj. A checkpoint may hold prefix.gate_up_proj as one layer."""

    def __init__(
        self,
        weights: WeightReader,
        activate: Callable[[Tensor], Tensor],
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        has_bias: bool = False,
        multiplier: float = 1.0,
    ) -> None:
        """activate: what a backend makes of gate and up, side by side; multiplier: of what comes out."""
        self.activate = activate
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = weights.fused(prefix, outputs, hidden_size, has_bias, whole="gate_up_proj")
        down = {"down_proj": hidden_size}
        self.down = weights.fused(prefix, down, intermediate_size, has_bias, multiplier=multiplier)

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        """x [T, hidden_size], whose first num_decode rows are decodes -> [T, hidden_size]."""
        return self.down(self.activate(self.gate_up(x, num_decode)), num_decode)
