"""Qwen 3, dense: q and k are normed per head before they are rotated; head_dim is its own number, 128 if absent."""

from __future__ import annotations

from appliance.models.config import ModelConfig, decoder_config
from appliance.models.config_fields import ConfigFields
from appliance.models.qwen2 import qwen_cache_groups


def qwen3(fields: ConfigFields) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", False)
    return decoder_config(
        fields,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        head_dim=128,
        cache_groups=qwen_cache_groups(fields),
    )
