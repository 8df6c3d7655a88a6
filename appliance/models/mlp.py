"""The feed-forward block of a decoder layer: y = down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from appliance.kernels.backend import Backend
from appliance.models.weights import WeightReader


class Mlp:
    """Tensors: prefix.{gate,up,down}_proj."""

    def __init__(
        self,
        weights: WeightReader,
        backend: Backend,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        has_bias: bool = False,
    ) -> None:
        self.backend = backend
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = weights.fused(prefix, outputs, hidden_size, has_bias)
        self.down = weights.fused(prefix, {"down_proj": hidden_size}, intermediate_size, has_bias)

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        """x [T, hidden_size], whose first num_decode rows are decodes -> [T, hidden_size]."""
        return self.down(self.backend.silu_and_mul(self.gate_up(x, num_decode)), num_decode)
