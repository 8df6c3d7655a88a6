"""Qwen 3.5 mixtures of experts (35B-A3B): the layers of Qwen 3.5 with many small experts and a shared one in each.

Published files also see: served is their text part. Defaults: transformers' Qwen3_5MoeTextConfig.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.models.config import ModelConfig, num_layers
from appliance.models.config_fields import ConfigFields
from appliance.models.mixture_config import read_mixture
from appliance.models.qwen3_5 import qwen3_5
from appliance.models.tensor_names import TensorNames
from appliance.models.text_part import TEXT_PART_ROOTS, read_text_config

DEFAULTS = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}


def qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    fields = fields.over(DEFAULTS)
    size = fields.integer("moe_intermediate_size", 1 << 22, 512)
    mixture = read_mixture(
        fields,
        frozenset(range(num_layers(fields))),
        num_experts=256,
        top_k=8,
        intermediate_size=size,
        is_normalized=True,
        shared_size=fields.integer("shared_expert_intermediate_size", 1 << 22, 512),
    )
    return replace(qwen3_5(fields), mixture=mixture)


def qwen3_5_moe_text_part(fields: ConfigFields) -> ModelConfig:
    is_tied = fields.boolean("tie_word_embeddings", False)
    text = read_text_config(fields, "qwen3_5_moe_text", {"tie_word_embeddings": is_tied})
    return replace(qwen3_5_moe(text), names=TensorNames(roots=TEXT_PART_ROOTS), is_text_part=True)
