"""The shape of a gated delta layer, and what such a layer remembers of a request. Knows config.json, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import CheckpointError
from appliance.models.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Hk key heads of Dk dimensions serve Hv value heads of Dv; a convolution looks back over `kernel_size` rows."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def key_size(self) -> int:
        """Of all heads of q, and as many of k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def parameters_per_input(self) -> int:
        """Parameters of a layer's matrices for each of the hidden_size inputs, or outputs."""
        return self.num_channels + 2 * self.value_size + 2 * self.num_value_heads

    @property
    def num_channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size


def read_gated_delta(fields: ConfigFields) -> GatedDeltaConfig:
    """Defaults: transformers' Qwen3_5TextConfig. Raises CheckpointError."""
    config = GatedDeltaConfig(
        num_key_heads=fields.integer("linear_num_key_heads", 1 << 12, 16),
        num_value_heads=fields.integer("linear_num_value_heads", 1 << 12, 32),
        key_dim=fields.integer("linear_key_head_dim", 1 << 12, 128),
        value_dim=fields.integer("linear_value_head_dim", 1 << 12, 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 1 << 8, 4, low=2),
    )
    if config.num_value_heads % config.num_key_heads:
        raise CheckpointError(
            f"config.json says 'linear_num_value_heads' is {config.num_value_heads} and 'linear_num_key_heads' is "
            f"{config.num_key_heads}: the first must be a multiple of the second."
        )
    return config
