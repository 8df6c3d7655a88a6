"""How a model turns positions into angles, as config.json says it: base frequency and scaling rule.

transformers 5 writes `rope_parameters`; older files write `rope_theta` beside `rope_scaling`, which wins where both
are. Priorities and defaults: transformers 5.24 modeling_rope_utils.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from appliance.errors import UnsupportedModelError
from appliance.models.config_fields import ConfigFields

_MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Wavelengths beyond the original context are slowed down by `factor`, short ones kept, a blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies of fewer than beta_slow turns in the original context are slowed down by `factor`, those of more than
    beta_fast kept, a ramp between; cos and sin are multiplied by attention_factor.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Every frequency is divided by a factor of its own, cos and sin are multiplied by attention_factor.

    Two sets of factors: `short` for contexts up to original_max_position, `long` beyond. Keys of one request stay in
    the cache for others, so the context that is asked for at load decides (all of the model's, if none is), not a
    request's length.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a head's first `rotary_dim` dimensions, None for all."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    rotary_dim: int | None = None
    is_interleaved: bool = False
    """Dimensions turn with their neighbours in the checkpoint, instead of each half with the other."""


def read_rope(
    config: ConfigFields, max_position: int, head_dim: int, partial_rotary_factor: float | None = None
) -> RopeConfig:
    """partial_rotary_factor: of an architecture that may turn a part of each head, what an absent one means.

    Raises CheckpointError for a wrong field, UnsupportedModelError for a rule that is not served.
    """
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    fields = config.object(key)
    if nested := [name for name, value in fields.values.items() if isinstance(value, dict)]:
        raise UnsupportedModelError(
            f"config.json has {key!r} of their own for {', '.join(nested)}: this architecture is served only with one "
            "rotary embedding for all layers, use another model."
        )
    theta = (fields if fields.has("rope_theta") else config).number("rope_theta", 2.0, 1e15, 10000.0)
    place = fields if fields.has("partial_rotary_factor") else config
    factor = place.number("partial_rotary_factor", 0.0, 1.0, partial_rotary_factor or 1.0)
    if factor != 1.0 and partial_rotary_factor is None:
        raise UnsupportedModelError(
            f"config.json says 'partial_rotary_factor' is {factor}: this architecture is served only with all head "
            "dimensions rotated, use another model."
        )
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not rotary_dim:
        raise place.wrong("partial_rotary_factor", f"what makes an even number of {head_dim} head dimensions")
    scaling = _scaling(config, fields, max_position, rotary_dim)
    return RopeConfig(theta, scaling, None if rotary_dim == head_dim else rotary_dim)


def _scaling(
    config: ConfigFields, fields: ConfigFields, max_position: int, rotary_dim: int
) -> LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None:
    """fields: those of the rule, in config.json's `config`."""
    kind = fields.values.get("rope_type") or fields.values.get("type") or "default"
    # The dynamic rule changes nothing up to max_position_embeddings, and no more is served.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(fields.number("factor", 1.0, _MAX_FACTOR))
    # The original context: beside the rule before within it, else the whole one.
    place = config if config.has("original_max_position_embeddings") else fields
    original = place.integer("original_max_position_embeddings", 1 << 30, max_position)
    if kind == "llama3":
        return _llama3(fields, original)
    # Phi 3's first files call its rule su, or yarn with factors of its own.
    if kind in ("longrope", "su") or (kind == "yarn" and fields.has("long_factor")):
        return _longrope(fields, original, max_position, rotary_dim)
    if kind == "yarn":
        return _yarn(fields, original, max_position)
    raise UnsupportedModelError(
        f"config.json says 'rope_type' of its rotary embedding is {kind!r}: served are 'default', 'dynamic', "
        "'linear', 'llama3', 'yarn' and 'longrope'."
    )


def _llama3(fields: ConfigFields, original: int) -> Llama3Scaling:
    low = fields.number("low_freq_factor", 0.0, _MAX_FACTOR)
    high = fields.number("high_freq_factor", 0.0, _MAX_FACTOR)
    if high <= low:
        raise fields.wrong("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
    return Llama3Scaling(fields.number("factor", 1.0, _MAX_FACTOR), low, high, original)


def _yarn(fields: ConfigFields, original: int, max_position: int) -> YarnScaling:
    factor = fields.number("factor", 1.0, _MAX_FACTOR, max(1.0, max_position / original))
    mscale = fields.number("mscale", 0.0, _MAX_FACTOR, 0.0)
    mscale_all_dim = fields.number("mscale_all_dim", 0.0, _MAX_FACTOR, 0.0)

    def attention_scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    default = attention_scale(1.0)
    if mscale and mscale_all_dim:
        default = attention_scale(mscale) / attention_scale(mscale_all_dim)
    # 0 means the default too.
    beta_fast = fields.number("beta_fast", 0.0, _MAX_FACTOR, 0.0) or 32.0
    beta_slow = fields.number("beta_slow", 0.0, _MAX_FACTOR, 0.0) or 1.0
    if beta_fast < beta_slow:
        raise fields.wrong("beta_fast", f"at least beta_slow, which is {beta_slow:g}")
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=fields.number("attention_factor", 0.0, _MAX_FACTOR, default),
        truncate=fields.boolean("truncate", True),
    )


def _longrope(fields: ConfigFields, original: int, max_position: int, rotary_dim: int) -> LongRopeScaling:
    factor = fields.number("factor", 1.0, _MAX_FACTOR, max(1.0, max_position / original))
    return LongRopeScaling(
        short=_factors(fields, "short_factor", rotary_dim // 2),
        long=_factors(fields, "long_factor", rotary_dim // 2),
        original_max_position=original,
        attention_factor=fields.number(
            "attention_factor", 0.0, _MAX_FACTOR, math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
        ),
    )


def _factors(fields: ConfigFields, key: str, count: int) -> tuple[float, ...]:
    values = fields.values.get(key)
    if (
        not isinstance(values, list)
        or len(values) != count
        or any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < _MAX_FACTOR for v in values)
    ):
        raise fields.wrong(key, f"a list of {count} numbers, one for each frequency")
    return tuple(float(value) for value in values)
