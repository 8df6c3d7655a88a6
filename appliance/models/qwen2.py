"""Qwen 2 and 2.5, QwQ and R1's distills of them: biases on q, k and v always, on o never; a window only on request."""

from __future__ import annotations

from appliance.models.cache_group import MAX_WINDOW, CacheGroup, read_cache_groups
from appliance.models.config import ModelConfig, decoder_config, num_layers
from appliance.models.config_fields import ConfigFields


def qwen2(fields: ConfigFields) -> ModelConfig:
    return decoder_config(fields, qkv_bias=True, cache_groups=qwen_cache_groups(fields))


def qwen_cache_groups(fields: ConfigFields) -> tuple[CacheGroup, ...]:
    """Layers from max_window_layers on slide, and only if use_sliding_window says so: most files name a sliding_window
    that is not used. Defaults: transformers' Qwen2Config.
    """
    first_sliding = fields.integer("max_window_layers", 1 << 12, 28, low=0)
    return read_cache_groups(fields, num_layers(fields), qwen_window(fields), first_sliding)


def qwen_window(fields: ConfigFields) -> int | None:
    """The window of layers that slide, None if none does."""
    is_used = fields.boolean("use_sliding_window", False) and fields.values.get("sliding_window", 4096) is not None
    return fields.integer("sliding_window", MAX_WINDOW, 4096) if is_used else None
