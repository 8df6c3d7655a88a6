"""Llama 1 to 3.3, and what is trained in its shape (Yi, SmolLM2, R1 distills): the plain decoder, biases by config."""

from __future__ import annotations

from appliance.models.config import ModelConfig, decoder_config
from appliance.models.config_fields import ConfigFields


def llama(fields: ConfigFields) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", False)
    return decoder_config(fields, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=fields.boolean("mlp_bias", False))
