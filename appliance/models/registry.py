"""Architectures by the name in config.json. Adding one: a file that declares it and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.errors import UnsupportedModelError
from appliance.models.config import ModelConfig
from appliance.models.config_fields import ConfigFields
from appliance.models.llama import llama
from appliance.models.mistral import mistral
from appliance.models.qwen2 import qwen2
from appliance.models.qwen3 import qwen3

MODELS: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "MinistralForCausalLM": mistral,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture config.json names. Raises UnsupportedModelError with the list of known ones."""
    found = config.get("architectures")
    for name in found if isinstance(found, list) else []:
        if name in MODELS:
            return str(name)
    shown = ", ".join(map(str, found)) if isinstance(found, list) and found else repr(found)
    raise UnsupportedModelError(f"The architecture {shown} is not served: known are {', '.join(sorted(MODELS))}.")


def read_model_config(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The shape of a model of a known architecture. Raises what `decoder_config` raises."""
    return MODELS[architecture](ConfigFields(config))
