"""The shape of a model, read from config.json field by field: each has a type, a bound and a default or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: type "default" or "llama3" with the latter's parameters."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig


def _number(config: Mapping[str, Any], key: str, low: float, high: float, default: Any = None) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json has no {key!r}: a number between {low:g} and {high:g} is needed.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(f"config.json says {key!r} is {value!r}: expected a number between {low:g} and {high:g}.")
    return value


def _integer(config: Mapping[str, Any], key: str, high: int, default: int | None = None) -> int:
    value = _number(config, key, 1, high, default)
    if value != int(value):
        raise CheckpointError(f"config.json says {key!r} is {value!r}: expected an integer between 1 and {high}.")
    return int(value)


def _boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json says {key!r} is {value!r}: expected true or false.")
    return value


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters; older files write rope_theta beside rope_scaling.
    for key in ("rope_parameters", "rope_scaling"):
        scaling = config.get(key)
        if scaling is not None:
            if not isinstance(scaling, Mapping):
                raise CheckpointError(f"config.json says {key!r} is {scaling!r}: expected an object.")
            break
    else:
        scaling = {}
    theta = float(_number({**config, **scaling}, "rope_theta", 1.0, 1e12, 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise UnsupportedModelError(f"config.json says 'rope_type' is {kind!r}: served are 'default' and 'llama3'.")
    return RopeConfig(
        theta,
        "llama3",
        factor=float(_number(scaling, "factor", 1.0, 1e6)),
        low_freq_factor=float(_number(scaling, "low_freq_factor", 0.0, 1e6)),
        high_freq_factor=float(_number(scaling, "high_freq_factor", 0.0, 1e6)),
        original_max_position=_integer(scaling, "original_max_position_embeddings", 1 << 30),
    )


def read_model_config(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The shape of a Llama-like model.

    Raises CheckpointError naming the key, what was found and what was expected; UnsupportedModelError for an activation
    or a rotary scaling that is not served.
    """
    hidden_size = _integer(config, "hidden_size", 1 << 20)
    num_heads = _integer(config, "num_attention_heads", 1 << 12)
    num_kv_heads = _integer(config, "num_key_value_heads", 1 << 12, num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json says 'num_attention_heads' is {num_heads} and 'num_key_value_heads' is {num_kv_heads}: "
            "the first must be a multiple of the second."
        )
    head_dim = _integer(config, "head_dim", 1 << 12, hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json gives a head dimension of {head_dim}: rotary embedding needs an even one.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"config.json says 'hidden_act' is {activation!r}: this architecture uses 'silu'.")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size", 1 << 22),
        num_layers=_integer(config, "num_hidden_layers", 1 << 12),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size", 1 << 24),
        max_position=_integer(config, "max_position_embeddings", 1 << 30, 2048),
        rms_norm_eps=float(_number(config, "rms_norm_eps", 0.0, 1.0, 1e-6)),
        tie_word_embeddings=_boolean(config, "tie_word_embeddings", False),
        attention_bias=_boolean(config, "attention_bias", False),
        mlp_bias=_boolean(config, "mlp_bias", False),
        rope=_rope(config),
    )
