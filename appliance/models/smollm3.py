"""SmolLM 3: Llama's block; q and k of every fourth layer are not turned. Defaults: transformers' SmolLM3Config."""

from __future__ import annotations

from dataclasses import replace

from appliance.models.cache_group import MAX_WINDOW, group_layers, read_cache_groups
from appliance.models.config import ModelConfig
from appliance.models.config_fields import ConfigFields
from appliance.models.llama import llama


def smollm3(fields: ConfigFields) -> ModelConfig:
    """Only layers that are not turned may have a window, unless layer_types says otherwise."""
    config = llama(fields.over({"rope_theta": 2e6, "tie_word_embeddings": True}))
    turns = _turning_layers(fields, config.num_layers)
    is_windowed = fields.boolean("use_sliding_window", False) and fields.has("sliding_window")
    window = fields.integer("sliding_window", MAX_WINDOW) if is_windowed else None
    groups = group_layers([None if is_turned else window for is_turned in turns])
    if fields.has("layer_types"):
        groups = read_cache_groups(fields, config.num_layers, window)
    ropes = tuple(config.rope if is_turned else None for is_turned in turns)
    return replace(config, layer_ropes=ropes, cache_groups=groups)


def _turning_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """no_rope_layers, whose 1 is a layer that turns, may go on beyond the model's layers."""
    if not fields.has("no_rope_layers"):
        interval = fields.integer("no_rope_layer_interval", 1 << 12, 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    listed = fields.values["no_rope_layers"]
    if not isinstance(listed, list) or len(listed) < num_layers or any(turns not in (0, 1) for turns in listed):
        raise fields.wrong("no_rope_layers", f"a list of at least {num_layers}, each of them 0 or 1")
    return [turns == 1 for turns in listed[:num_layers]]
