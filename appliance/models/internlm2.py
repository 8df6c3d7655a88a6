"""InternLM 2 and 2.5: Llama's block under names of its own; q, k and v are one layer, laid out kv head by kv head.

The folder's Python is not run: facts are those of its modeling_internlm2.py.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.models.config import ModelConfig, decoder_config
from appliance.models.config_fields import ConfigFields
from appliance.models.tensor_names import TensorNames

NAMES = TensorNames(
    roots=(("model", "output"),),
    renamed=(
        ("embed_tokens", "tok_embeddings"),
        ("self_attn", "attention"),
        ("qkv_proj", "wqkv"),
        ("o_proj", "wo"),
        ("mlp", "feed_forward"),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ),
)


def internlm2(fields: ConfigFields) -> ModelConfig:
    has_bias = fields.boolean("bias", False)
    config = decoder_config(fields, qkv_bias=has_bias, output_bias=has_bias)
    return replace(config, names=NAMES, is_qkv_by_kv_head=True)
