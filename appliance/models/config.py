"""The shape of a model: what an architecture's declaration makes of config.json."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.models.cache_group import CacheGroup, group_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.mixture_config import MixtureConfig
from appliance.models.rope_config import RopeConfig, YarnScaling, read_rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of pre-normed attention and SwiGLU blocks."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding; a tokenizer may know fewer."""
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm of each head of q and k, before they are rotated."""
    rope: RopeConfig
    cache_groups: tuple[CacheGroup, ...]
    """Together they name every layer once."""
    mixture: MixtureConfig | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None is full attention."""
        by_layer = {layer: group.window for group in self.cache_groups for layer in group.layers}
        return tuple(by_layer[layer] for layer in range(self.num_layers))

    @property
    def mixtures(self) -> tuple[MixtureConfig | None, ...]:
        """The mixture of experts of each layer; None is an MLP of intermediate_size."""
        layers = () if self.mixture is None else self.mixture.layers
        return tuple(self.mixture if layer in layers else None for layer in range(self.num_layers))

    @property
    def linear_parameters(self) -> int:
        """Parameters of all layers' matrices, every expert's included."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        widths = (3 * self.intermediate_size if m is None else m.parameters_per_input for m in self.mixtures)
        return self.hidden_size * sum(attention + width for width in widths)

    @property
    def mlp_row_values(self) -> int:
        """The most numbers that an MLP holds of one row at a time."""
        widths = (3 * self.intermediate_size if m is None else m.row_values(self.hidden_size) for m in self.mixtures)
        return self.hidden_size + max(widths)


def num_layers(fields: ConfigFields) -> int:
    return fields.integer("num_hidden_layers", 1 << 12)


def decoder_config(
    fields: ConfigFields,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    cache_groups: tuple[CacheGroup, ...] | None = None,
    mixture: MixtureConfig | None = None,
) -> ModelConfig:
    """What all served architectures write alike, and what the one at hand adds to it.

    head_dim: what an absent one means, None for hidden_size / num_attention_heads; cache_groups: None for full
    attention in every layer. Raises CheckpointError naming the key, what was found and what was expected;
    UnsupportedModelError for an activation or a rotary scaling that is not served.
    """
    hidden_size = fields.integer("hidden_size", 1 << 20)
    num_heads = fields.integer("num_attention_heads", 1 << 12)
    num_kv_heads = fields.integer("num_key_value_heads", 1 << 12, num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json says 'num_attention_heads' is {num_heads} and 'num_key_value_heads' is {num_kv_heads}: "
            "the first must be a multiple of the second."
        )
    head_dim = fields.integer("head_dim", 1 << 12, head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json gives a head dimension of {head_dim}: rotary embedding needs an even one.")
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"config.json says 'hidden_act' is {activation!r}: this architecture uses 'silu'.")
    max_position = fields.integer("max_position_embeddings", 1 << 30, 2048)
    rope = read_rope(fields, max_position)
    if isinstance(rope.scaling, YarnScaling):
        # Makers who leave YaRN to the user (Qwen 2.5) leave the original context in max_position_embeddings.
        max_position = max(max_position, int(rope.scaling.original_max_position * rope.scaling.factor))
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1 << 22),
        num_layers=num_layers(fields),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1 << 24),
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        rope=rope,
        cache_groups=cache_groups or group_layers([None] * num_layers(fields)),
        mixture=mixture,
    )
