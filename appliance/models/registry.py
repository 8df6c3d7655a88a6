"""Architectures by the name in config.json. Adding one: a file that declares it and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.errors import UnsupportedModelError
from appliance.models.llama import LlamaModel

MODELS: dict[str, type[LlamaModel]] = {"LlamaForCausalLM": LlamaModel}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture config.json names. Raises UnsupportedModelError with the list of known ones."""
    found = config.get("architectures")
    for name in found if isinstance(found, list) else []:
        if name in MODELS:
            return str(name)
    shown = ", ".join(map(str, found)) if isinstance(found, list) and found else repr(found)
    raise UnsupportedModelError(f"The architecture {shown} is not served: known are {', '.join(sorted(MODELS))}.")
