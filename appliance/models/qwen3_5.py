"""Qwen 3.5, dense: three of every four layers are gated delta layers, one is full attention with gates and a quarter of
each head turned. Norms multiply by one plus their weights.

Published files also see: served is their text part. Positions in time, height and width are one and the same in text.
Defaults: transformers' Qwen3_5TextConfig.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.models.cache_group import CacheGroup
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.gated_delta_config import read_gated_delta
from appliance.models.tensor_names import TensorNames
from appliance.models.text_part import TEXT_PART_ROOTS, read_text_config

DEFAULTS = {
    "head_dim": 256,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}


def qwen3_5(fields: ConfigFields) -> ModelConfig:
    fields = fields.over(DEFAULTS)
    has_bias = fields.boolean("attention_bias", False)
    config = decoder_config(
        fields,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        partial_rotary_factor=0.25,
        cache_groups=_cache_groups(fields),
    )
    return replace(config, is_attention_gated=True, norms_add_one=True, gated_delta=read_gated_delta(fields))


def qwen3_5_text_part(fields: ConfigFields) -> ModelConfig:
    is_tied = fields.boolean("tie_word_embeddings", False)
    text = read_text_config(fields, "qwen3_5_text", {"tie_word_embeddings": is_tied})
    return replace(qwen3_5(text), names=TensorNames(roots=TEXT_PART_ROOTS), is_text_part=True)


def _cache_groups(fields: ConfigFields) -> tuple[CacheGroup, ...]:
    """Raises CheckpointError for a list that is not one kind a layer, or names no layer of full attention."""
    count = num_layers(fields)
    interval = fields.integer("full_attention_interval", 1 << 12, 4)
    types = fields.values.get("layer_types")
    if types is None:
        types = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    kinds = ("full_attention", "linear_attention")
    if not isinstance(types, list) or len(types) != count or any(kind not in kinds for kind in types):
        raise fields.wrong("layer_types", f"a list of {count}, each of them 'full_attention' or 'linear_attention'")
    full, linear = (tuple(layer for layer, found in enumerate(types) if found == kind) for kind in kinds)
    if not full:
        raise fields.wrong("layer_types", "at least one 'full_attention'")
    return (CacheGroup(full), CacheGroup(linear, is_recurrent=True)) if linear else (CacheGroup(full),)
