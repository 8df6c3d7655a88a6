"""Granite 3: Llama's block with multipliers of embeddings, scores, residual additions and logits."""

from __future__ import annotations

from dataclasses import replace

from appliance.models.config import ModelConfig
from appliance.models.config_fields import ConfigFields
from appliance.models.llama import llama

_MAX = 1e6


def granite(fields: ConfigFields) -> ModelConfig:
    """Absent multipliers are 1, as in transformers' GraniteConfig: that of scores too, whatever the head dimension."""
    return replace(
        llama(fields),
        embedding_multiplier=fields.number("embedding_multiplier", 1 / _MAX, _MAX, 1.0),
        attention_scale=fields.number("attention_multiplier", 1 / _MAX, _MAX, 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1 / _MAX, _MAX, 1.0),
        logits_divisor=fields.number("logits_scaling", 1 / _MAX, _MAX, 1.0),
    )
