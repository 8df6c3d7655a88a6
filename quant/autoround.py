"""AutoRound's own configuration: whose words its tensors are in. It knows keys and names of packings, no tensors.

AutoRound packs as GPTQ does, without a g_idx, or as AWQ does. `extra_config` gives single modules other bits and groups
(16 bits: not quantised); the tensors show both.
"""

from __future__ import annotations

from typing import Any

from appliance.errors import UnsupportedModelError

AUTOROUND_METHODS = ("auto-round", "intel/auto-round")
# Packings that store zero points as they are (auto_round/inference/backend.py).
_AS_THEY_ARE = ("auto_round", "auto_round:exllamav2", "auto_round:tritonv2")


def autoround_layout(file: str, raw: dict[str, Any], packing: str | None) -> str | None:
    """The layout that a packing stands for: gptq, gptq_v2 or gemm; None when none is named.

    packing: `packing_format`, or `backend` in older files, lower case. Raises UnsupportedModelError naming file, key
    and value for models that also round activations or whose codes are not integers.
    """
    activation_bits, data_type = raw.get("act_bits"), raw.get("data_type")
    if isinstance(activation_bits, int) and activation_bits <= 8:
        raise UnsupportedModelError(
            f"{file} says act_bits {activation_bits}, activations of 16 bits are supported: use an AutoRound "
            "checkpoint that quantises weights only"
        )
    if data_type is not None and not str(data_type).startswith("int"):  # int, int_sym, ...
        raise UnsupportedModelError(
            f"{file} says data_type {data_type!r}, 'int' is supported: use an AutoRound checkpoint of integer weights"
        )
    if packing is None:
        return None
    if "awq" in packing:
        return "gemm"
    if packing in _AS_THEY_ARE or "gptqmodel" in packing:
        return "gptq_v2"
    if "gptq" in packing:
        return "gptq"
    raise UnsupportedModelError(
        f"{file} says packing {packing!r}, auto_round, auto_round:auto_gptq, auto_round:gptqmodel and "
        "auto_round:auto_awq are supported: export the model in one of these"
    )
