"""Phi 3, 3.5, 4 and their mini forms: q, k and v are one layer, and so are gate and up; a part of each head may turn.

Rotary factors for short and for long contexts; a window in every layer, or null.
"""

from __future__ import annotations

from appliance.models.cache_group import MAX_WINDOW, read_cache_groups
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields


def phi3(fields: ConfigFields) -> ModelConfig:
    window = fields.integer("sliding_window", MAX_WINDOW) if fields.has("sliding_window") else None
    groups = read_cache_groups(fields, num_layers(fields), window)
    return decoder_config(fields, partial_rotary_factor=1.0, cache_groups=groups)
