"""The shape of a model: what an architecture's declaration makes of config.json.

Fields with a default are what only some architectures have; their declarations set them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.models.cache_group import CacheGroup, even_groups, group_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.gated_delta_config import GatedDeltaConfig
from appliance.models.mixture_config import MixtureConfig
from appliance.models.rope_config import LongRopeScaling, RopeConfig, YarnScaling, read_rope
from appliance.models.tensor_names import LLAMA_NAMES, TensorNames


class Activation(StrEnum):
    """Of the gate of an MLP; gelu is its tanh form."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of pre-normed attention and gated MLP blocks, or mixtures of such MLPs."""

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
    names: TensorNames = LLAMA_NAMES
    is_qkv_by_kv_head: bool = False
    """A layer of q, k and v has, for each kv head, its q heads, its k and its v; else all q, all k, all v."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """Rotary embedding of each layer where they differ, None where it has none; empty where all have `rope`."""
    activation: Activation = Activation.SILU
    is_attention_gated: bool = False
    """What attention gives is multiplied by the sigmoid of a gate that q_proj computes beside q."""
    gated_delta: GatedDeltaConfig | None = None
    """Of the layers of the recurrent group, if there is one."""
    mixture: MixtureConfig | None = None
    norms_add_one: bool = False
    """RMSNorms multiply by one plus their weights."""
    has_output_norms: bool = False
    """What attention and MLP add to the residual stream is normed first."""
    attention_scale: float | None = None
    """Of scores; None for 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    logits_divisor: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of what attention and MLP add to the residual stream."""
    needs_bfloat16: bool = False
    """Activations leave float16's range."""
    is_text_part: bool = False
    """Of a model that takes images too, which are not served."""

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """Rotary embedding of each layer, None where q and k are not turned."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the context that is served."""
        scaling = self.rope.scaling
        if not isinstance(scaling, LongRopeScaling) or self.max_position <= scaling.original_max_position:
            return ()
        return (
            f"A context of {self.max_position} tokens takes this model's rotary factors for long texts; for short ones "
            f"it is better with --max-model-len {scaling.original_max_position}.",
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None is full attention."""
        by_layer = {layer: group.window for group in self.cache_groups for layer in group.layers}
        return tuple(by_layer[layer] for layer in range(self.num_layers))

    @property
    def paged_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that have a block table each, equal in size but for the last of each kind."""
        return even_groups([group for group in self.cache_groups if not group.is_recurrent])

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that keep a state instead of a cache."""
        return tuple(layer for group in self.cache_groups if group.is_recurrent for layer in group.layers)

    @property
    def mixtures(self) -> tuple[MixtureConfig | None, ...]:
        """The mixture of experts of each layer; None is an MLP of intermediate_size."""
        layers = () if self.mixture is None else self.mixture.layers
        return tuple(self.mixture if layer in layers else None for layer in range(self.num_layers))

    @property
    def linear_parameters(self) -> int:
        """Parameters of all layers' matrices, every expert's included."""
        num_queries = self.num_heads * (3 if self.is_attention_gated else 2)
        attention = (num_queries + 2 * self.num_kv_heads) * self.head_dim
        num_recurrent = len(self.recurrent_layers)
        mixers = (self.num_layers - num_recurrent) * attention
        if self.gated_delta is not None:
            mixers += num_recurrent * self.gated_delta.parameters_per_input
        widths = (3 * self.intermediate_size if m is None else m.parameters_per_input for m in self.mixtures)
        return self.hidden_size * (mixers + sum(widths))

    @property
    def mlp_row_values(self) -> int:
        """The most numbers that an MLP holds of one row at a time."""
        widths = (3 * self.intermediate_size if m is None else m.row_values(self.hidden_size) for m in self.mixtures)
        return self.hidden_size + max(widths)

    def within(self, max_model_len: int | None) -> ModelConfig:
        """The model as it is served with contexts of at most so many tokens; None for all that it can."""
        if max_model_len is None:
            return self
        return replace(self, max_position=min(max_model_len, self.max_position))


def num_layers(fields: ConfigFields) -> int:
    return fields.integer("num_hidden_layers", 1 << 12)


def decoder_config(
    fields: ConfigFields,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    activation: Activation = Activation.SILU,
    head_dim: int | None = None,
    partial_rotary_factor: float | None = None,
    cache_groups: tuple[CacheGroup, ...] | None = None,
    mixture: MixtureConfig | None = None,
) -> ModelConfig:
    """What all served architectures write alike, and what the one at hand adds to it.

    head_dim: what an absent one means, None for hidden_size / num_attention_heads; partial_rotary_factor: likewise,
    None where all dimensions turn always; cache_groups: None for full attention in every layer. Raises CheckpointError
    naming the key, what was found and what was expected; UnsupportedModelError for an activation or a rotary scaling
    that is not served.
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
    # Gemma's own key; hidden_act beside it is a leftover.
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    if fields.values.get(key, activation) != activation:
        raise UnsupportedModelError(
            f"config.json says {key!r} is {fields.values[key]!r}: this architecture uses {activation.value!r}."
        )
    max_position = fields.integer("max_position_embeddings", 1 << 30, 2048)
    rope = read_rope(fields, max_position, head_dim, partial_rotary_factor)
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
        activation=activation,
        cache_groups=cache_groups or group_layers([None] * num_layers(fields)),
        mixture=mixture,
    )
