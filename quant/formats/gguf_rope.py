"""How a GGUF file scales its rotary frequencies, in the terms of config.json's `rope_scaling`.

Keys `<arch>.rope.scaling.*` (the `gguf` package's constants.py) name linear and YaRN scaling. Llama 3's has no keys:
tensor rope_freqs.weight [head_dim / 2] holds what each frequency is divided by (convert_hf_to_gguf.py), and the numbers
it was made of are found again from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from appliance.errors import CheckpointError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
_REFUSED = ("alpha", "attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")
# Of every published Llama 3; only the factor differs.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192


def rope_scaling(
    read: Callable[[str], Any], factors: Sequence[float] | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """None where nothing is scaled. `read` gives the value of a key after `<arch>.rope.scaling.`, or None.

    Raises UnsupportedModelError for a scaling that is not served, CheckpointError for a missing factor.
    """
    kind = read("type")
    if factors is not None:
        if kind in (None, "none"):
            return _llama3(factors, theta, head_dim)
        raise UnsupportedModelError(
            f"the GGUF file has both {ROPE_FACTORS} and rotary scaling {kind!r}, one of them is read: use the model's "
            "safetensors"
        )
    if kind in (None, "none"):
        return None
    refused = [key for key in _REFUSED if read(key) is not None]
    if kind not in ("linear", "yarn") or refused:
        found = f"{kind!r} with {', '.join(refused)}" if refused else repr(kind)
        raise UnsupportedModelError(
            f"the GGUF file's rotary scaling is {found}, linear and plain yarn are read: use the model's safetensors"
        )
    factor = read("factor")
    if not isinstance(factor, int | float) or not factor >= 1.0:
        raise CheckpointError(f"GGUF metadata rope.scaling.factor is {factor!r}, a number of at least 1 was expected")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    keys = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    given = {name: read(key) for name, key in keys.items() if read(key) is not None}
    return {"rope_type": "yarn", "factor": factor, **given}


def _llama3(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling that makes these factors. Raises UnsupportedModelError where that of Llama 3 does not."""
    factor = max(factors, default=1.0)

    def made(index: int) -> float:
        turns = _ORIGINAL * math.pow(theta, -2 * index / head_dim) / (2 * math.pi)  # in the original context
        kept = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        return 1 / ((1 - kept) / factor + kept)

    if (
        not 1.0 <= factor < math.inf
        or len(factors) != head_dim // 2
        or not all(math.isclose(found, made(index), rel_tol=1e-4) for index, found in enumerate(factors))
    ):
        raise UnsupportedModelError(
            f"the factors of the GGUF file's tensor {ROPE_FACTORS} are not those of Llama 3 scaled by {factor:g}: use "
            "the model's safetensors"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }
