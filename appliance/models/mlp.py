"""The feed-forward block of a decoder layer: y = down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from appliance.kernels.backend import Backend
from appliance.models.config import Activation
from appliance.models.weights import WeightReader


class Mlp:
    """Tensors: prefix.{gate,up,down}_proj, or gate_up_proj for the first two."""

    def __init__(
        self,
        weights: WeightReader,
        backend: Backend,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        has_bias: bool = False,
        activation: Activation = Activation.SILU,
        multiplier: float = 1.0,
    ) -> None:
        """multiplier: of the result."""
        self.activate = backend.gelu_and_mul if activation is Activation.GELU else backend.silu_and_mul
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = weights.fused(prefix, outputs, hidden_size, has_bias, whole="gate_up_proj")
        self.down = weights.fused(
            prefix, {"down_proj": hidden_size}, intermediate_size, has_bias, multiplier=multiplier
        )

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        """x [T, hidden_size], whose first num_decode rows are decodes -> [T, hidden_size]."""
        return self.down(self.activate(self.gate_up(x, num_decode)), num_decode)
