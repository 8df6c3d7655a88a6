"""Architectures by the name in config.json. Adding one: a file that declares it and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.errors import UnsupportedModelError
from appliance.models.config import ModelConfig
from appliance.models.config_fields import ConfigFields
from appliance.models.gemma import gemma2, gemma3, gemma3_text_part
from appliance.models.glm import glm, glm4
from appliance.models.granite import granite
from appliance.models.internlm2 import internlm2
from appliance.models.llama import llama
from appliance.models.mistral import mistral, mistral3
from appliance.models.mixtral import mixtral
from appliance.models.phi3 import phi3
from appliance.models.qwen2 import qwen2
from appliance.models.qwen2_moe import qwen2_moe
from appliance.models.qwen3 import qwen3
from appliance.models.qwen3_5 import qwen3_5, qwen3_5_text_part
from appliance.models.qwen3_5_moe import qwen3_5_moe, qwen3_5_moe_text_part
from appliance.models.qwen3_moe import qwen3_moe
from appliance.models.smollm3 import smollm3

MODELS: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_text_part,
    "Glm4ForCausalLM": glm4,
    "GlmForCausalLM": glm,
    "GraniteForCausalLM": granite,
    "InternLM2ForCausalLM": internlm2,
    "LlamaForCausalLM": llama,
    "MinistralForCausalLM": mistral,
    "Mistral3ForConditionalGeneration": mistral3,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5_text_part,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_text_part,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "SmolLM3ForCausalLM": smollm3,
}

# Architectures that exist only as Python code in a model's folder: what they are, what to use, its architecture.
REMOTE_CODE: dict[str, tuple[str, str, str]] = {
    "QWenLMHeadModel": ("Qwen 1", "Qwen2.5 or Qwen3", "Qwen3ForCausalLM"),
    "ChatGLMModel": ("ChatGLM 1 to 3", "Qwen3", "Qwen3ForCausalLM"),
    "ChatGLMForConditionalGeneration": ("ChatGLM 1 to 3", "Qwen3", "Qwen3ForCausalLM"),
    "BaichuanForCausalLM": ("Baichuan 1 and 2", "Baichuan-M2", "Qwen2ForCausalLM"),
    "BaiChuanForCausalLM": ("Baichuan 1", "Baichuan-M2", "Qwen2ForCausalLM"),
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture config.json names. Raises UnsupportedModelError with what to use instead."""
    found = config.get("architectures")
    names = [str(name) for name in found] if isinstance(found, list) else []
    for name in names:
        if name in MODELS:
            return name
        if name in REMOTE_CODE:
            model, successor, _ = REMOTE_CODE[name]
            raise UnsupportedModelError(
                f"The architecture {name} ({model}) is Python code in the model's folder, which is never run: "
                f"use {successor}."
            )
    shown = ", ".join(names) or repr(found)
    if config.get("auto_map"):
        raise UnsupportedModelError(
            f"The architecture {shown} is Python code in the model's folder (auto_map), which is never run: "
            f"use a model of {', '.join(sorted(MODELS))}."
        )
    raise UnsupportedModelError(f"The architecture {shown} is not served: known are {', '.join(sorted(MODELS))}.")


def read_model_config(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The shape of a model of a known architecture. Raises what `decoder_config` raises."""
    return MODELS[architecture](ConfigFields(config))
