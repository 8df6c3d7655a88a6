"""Mistral 7B to Mistral Small, Nemo, Ministral: the plain decoder with a window in every layer, or as layer_types says.

Version 0.1 of the 7B has a window of 4096, most later models write null. head_dim is its own number. Mistral Small from
3.1 on also sees: served is its text part. Defaults of that: transformers' Mistral3Config.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.models.cache_group import MAX_WINDOW, read_cache_groups
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.tensor_names import TensorNames
from appliance.models.text_part import TEXT_PART_ROOTS, read_text_config

SMALL_DEFAULTS = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 131072,
}


def mistral(fields: ConfigFields) -> ModelConfig:
    # Absent is not null here: transformers' MistralConfig fills in the first version's window.
    is_null = fields.values.get("sliding_window", 4096) is None
    window = None if is_null else fields.integer("sliding_window", MAX_WINDOW, 4096)
    return decoder_config(fields, cache_groups=read_cache_groups(fields, num_layers(fields), window))


def mistral3(fields: ConfigFields) -> ModelConfig:
    text = read_text_config(fields, "mistral", SMALL_DEFAULTS)
    return replace(mistral(text), names=TensorNames(roots=TEXT_PART_ROOTS), is_text_part=True)
