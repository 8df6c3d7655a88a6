"""Mistral 7B to Mistral Small, Nemo, Ministral: the plain decoder with a window in every layer, or as layer_types says.

Version 0.1 of the 7B has a window of 4096, most later models write null. head_dim is its own number.
"""

from __future__ import annotations

from appliance.models.cache_group import MAX_WINDOW, read_cache_groups
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields


def mistral(fields: ConfigFields) -> ModelConfig:
    # Absent is not null here: transformers' MistralConfig fills in the first version's window.
    is_null = fields.values.get("sliding_window", 4096) is None
    window = None if is_null else fields.integer("sliding_window", MAX_WINDOW, 4096)
    return decoder_config(fields, cache_groups=read_cache_groups(fields, num_layers(fields), window))
