"""GLM 4: half of each head turns, by pairs of neighbours; gate and up are one layer.

The 9B of 2024 has the plain block, those of 2025 also norm what attention and MLP add. Defaults: transformers'
GlmConfig and Glm4Config.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.models.config import ModelConfig, decoder_config
from appliance.models.config_fields import ConfigFields
from appliance.models.tensor_names import TensorNames

NAMES = TensorNames(
    renamed=(("attention_output_norm", "post_self_attn_layernorm"), ("mlp_output_norm", "post_mlp_layernorm"))
)


def glm(fields: ConfigFields) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", True)
    config = decoder_config(fields, qkv_bias=has_bias, head_dim=128, partial_rotary_factor=0.5)
    return replace(config, rope=replace(config.rope, is_interleaved=True))


def glm4(fields: ConfigFields) -> ModelConfig:
    return replace(glm(fields), names=NAMES, has_output_norms=True)
