"""Qwen 1.5 and 2 mixtures of experts: Qwen 2 with routed experts and one shared expert, whose share a gate decides.

Which layers slide, where a window is used and nothing is listed, is transformers' Qwen2MoeConfig's rule: every second
one below max_window_layers.
"""

from __future__ import annotations

from appliance.models.cache_group import CacheGroup, group_layers, read_cache_groups
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.mixture_config import read_mixture, sparse_layers
from appliance.models.qwen2 import qwen_window


def qwen2_moe(fields: ConfigFields) -> ModelConfig:
    return decoder_config(
        fields,
        qkv_bias=fields.boolean("qkv_bias", True),
        cache_groups=_cache_groups(fields),
        mixture=read_mixture(
            fields,
            sparse_layers(fields, num_layers(fields)),
            num_experts=60,
            top_k=4,
            intermediate_size=fields.integer("moe_intermediate_size", 1 << 22, 1408),
            is_normalized=fields.boolean("norm_topk_prob", False),
            shared_size=fields.integer("shared_expert_intermediate_size", 1 << 22, 5632),
        ),
    )


def _cache_groups(fields: ConfigFields) -> tuple[CacheGroup, ...]:
    window, layers = qwen_window(fields), num_layers(fields)
    if fields.has("layer_types"):
        return read_cache_groups(fields, layers, window)
    stop = fields.integer("max_window_layers", 1 << 12, 28, low=0)
    return group_layers([window if layer % 2 == 0 and layer < stop else None for layer in range(layers)])
