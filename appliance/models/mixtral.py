"""Mixtral 8x7B and 8x22B: Mistral with eight large experts in every layer, the shares of a row's two adding up to one.

Unlike Mistral's, an absent sliding_window means none, and rotary angles are those of theta 1e6 if none is given.
"""

from __future__ import annotations

from appliance.models.cache_group import MAX_WINDOW, group_layers
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.mixture_config import read_mixture


def mixtral(fields: ConfigFields) -> ModelConfig:
    layers = num_layers(fields)
    window = fields.integer("sliding_window", MAX_WINDOW) if fields.has("sliding_window") else None
    return decoder_config(
        ConfigFields({"rope_theta": 1e6, **fields.values}),
        cache_groups=group_layers([window] * layers),
        mixture=read_mixture(
            fields,
            frozenset(range(layers)),
            num_experts=8,
            top_k=2,
            intermediate_size=fields.integer("intermediate_size", 1 << 22, 14336),
            is_normalized=True,
        ),
    )
