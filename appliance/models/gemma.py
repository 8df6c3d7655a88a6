"""Gemma 2 and 3, and the text part of Gemma 3 that sees: norms of one plus a weight before and after attention and MLP,
scaled and tied embeddings, gelu, sliding and full layers in turn.

Gemma 2 caps attention's scores and the logits; Gemma 3 norms q and k instead, and its sliding layers have a rotary base
of their own. Defaults, which makers leave out: transformers' Gemma2Config and Gemma3TextConfig.
"""

from __future__ import annotations

import math
from dataclasses import replace

from appliance.errors import UnsupportedModelError
from appliance.models.cache_group import MAX_WINDOW, read_cache_groups
from appliance.models.config import Activation, ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.rope_config import read_rope
from appliance.models.tensor_names import TensorNames
from appliance.models.text_part import TEXT_PART_ROOTS, read_text_config

NAMES = TensorNames(
    renamed=(
        ("attention_output_norm", "post_attention_layernorm"),
        ("post_attention_layernorm", "pre_feedforward_layernorm"),
        ("mlp_output_norm", "post_feedforward_layernorm"),
    )
)
SHARED_DEFAULTS = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS = {
    **SHARED_DEFAULTS,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
}
GEMMA3_DEFAULTS = {**SHARED_DEFAULTS, "max_position_embeddings": 131072, "vocab_size": 262208}


def gemma2(fields: ConfigFields) -> ModelConfig:
    fields = fields.over(GEMMA2_DEFAULTS)
    return replace(_gemma(fields, 2), attention_soft_cap=_cap(fields, "attn_logit_softcapping"))


def gemma3(fields: ConfigFields) -> ModelConfig:
    fields = fields.over(GEMMA3_DEFAULTS)
    rules = fields.object("rope_parameters")
    full = ConfigFields({**fields.values, "rope_parameters": rules.values.get("full_attention")}).over(
        {"rope_theta": 1e6}
    )
    sliding = ConfigFields(
        {
            "rope_parameters": rules.values.get("sliding_attention"),
            "rope_theta": fields.values.get("rope_local_base_freq", 1e4),
        }
    )
    config = _gemma(full, fields.integer("sliding_window_pattern", 1 << 12, 6), qk_norm=True)
    local = read_rope(sliding, config.max_position, config.head_dim)
    return replace(config, layer_ropes=tuple(config.rope if window is None else local for window in config.windows))


def gemma3_text_part(fields: ConfigFields) -> ModelConfig:
    config = gemma3(read_text_config(fields, "gemma3_text", GEMMA3_DEFAULTS))
    return replace(config, names=replace(NAMES, roots=TEXT_PART_ROOTS), is_text_part=True)


def _gemma(fields: ConfigFields, pattern: int, *, qk_norm: bool = False) -> ModelConfig:
    """pattern: unless layer_types says otherwise, every so manieth layer is a full one."""
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModelError(
            "config.json says 'use_bidirectional_attention' is True: such a model embeds texts and writes none, use "
            "another model."
        )
    count = num_layers(fields)
    if not fields.has("layer_types"):
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(count)]
        fields = ConfigFields({**fields.values, "layer_types": kinds})
    window = fields.integer("sliding_window", MAX_WINDOW, 4096)
    has_bias = fields.boolean("attention_bias", False)
    config = decoder_config(
        fields,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=qk_norm,
        activation=Activation.GELU,
        cache_groups=read_cache_groups(fields, count, window),
    )
    return replace(
        config,
        names=NAMES,
        norms_add_one=True,
        has_output_norms=True,
        attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e6, 256.0) ** -0.5,
        logits_soft_cap=_cap(fields, "final_logit_softcapping"),
        embedding_multiplier=math.sqrt(config.hidden_size),
        needs_bfloat16=True,
    )


def _cap(fields: ConfigFields, key: str) -> float | None:
    return fields.number(key, 1e-3, 1e6) if fields.has(key) else None
