"""Qwen 3 mixtures of experts (30B-A3B, Coder): Qwen 3 with many small experts in most layers, none shared.

A window, where it is used, is every layer's (transformers' Qwen3MoeModel); published files use none.
"""

from __future__ import annotations

from appliance.models.cache_group import group_layers
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.mixture_config import read_mixture, sparse_layers
from appliance.models.qwen2 import qwen_window


def qwen3_moe(fields: ConfigFields) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", False)
    return decoder_config(
        fields,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        cache_groups=group_layers([qwen_window(fields)] * num_layers(fields)),
        mixture=read_mixture(
            fields,
            sparse_layers(fields, num_layers(fields)),
            num_experts=128,
            top_k=8,
            intermediate_size=fields.integer("moe_intermediate_size", 1 << 22, 768),
            is_normalized=fields.boolean("norm_topk_prob", False),
        ),
    )
