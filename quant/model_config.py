"""Sanity of a config.json's numbers, before anything is sized by them. It knows no architecture's meaning."""

from __future__ import annotations

from typing import Any

from appliance.errors import CheckpointError

# Far above every published model, far below what would overflow or exhaust a machine.
_INTEGER_LIMITS = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 4096,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
}
_REAL_LIMITS = {"rms_norm_eps": 1.0, "rope_theta": 1e15}


def check_model_config(config: dict[str, Any]) -> None:
    """Raises CheckpointError naming the key, the value found and what is allowed. Absent keys are allowed."""
    for prefix, section in (("", config), ("text_config.", config.get("text_config"))):
        if section is None:
            continue
        if not isinstance(section, dict):
            raise CheckpointError(f"config.json: text_config is {section!r}, an object was expected")
        for key, limit in _INTEGER_LIMITS.items():
            value = section.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise CheckpointError(
                    f"config.json: {prefix}{key} is {value!r}, an integer from 1 to {limit} is allowed: correct it"
                )
        for key, maximum in _REAL_LIMITS.items():
            value = section.get(key)
            if value is None:
                continue
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if not real or not 0 < value <= maximum:  # false for NaN too
                raise CheckpointError(
                    f"config.json: {prefix}{key} is {value!r}, a number from above 0 to {maximum:g} is allowed"
                )
