"""Tiny random checkpoints with known answers from transformers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PixtralVisionConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipVisionConfig,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.quant.writers import exact_weight, gptq_config, gptq_tensors, gptqmodel_zero_words

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def _gemma3_that_sees(**text: Any) -> Gemma3Config:
    vision = SiglipVisionConfig(**VISION)
    return Gemma3Config(text_config=Gemma3TextConfig(**text), vision_config=vision, mm_tokens_per_image=4)


def _mistral3(**text: Any) -> Mistral3Config:
    vision = PixtralVisionConfig(**VISION)
    return Mistral3Config(text_config=MistralConfig(**text), vision_config=vision, tie_word_embeddings=False)


def _with_hybrid_defaults(text: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    }
    return {**defaults, **text}


HYBRID_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def _qwen3_5(**text: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**_with_hybrid_defaults(text))


def _qwen3_5_that_sees(**text: Any) -> Qwen3_5Config:
    parts: dict[str, Any] = {"text_config": _qwen3_5(**text).to_dict(), "vision_config": HYBRID_VISION}
    return Qwen3_5Config(**parts, tie_word_embeddings=False)


def _qwen3_5_moe(**text: Any) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(**_with_hybrid_defaults(text))


def _qwen3_5_moe_that_sees(**text: Any) -> Qwen3_5MoeConfig:
    parts: dict[str, Any] = {"text_config": _qwen3_5_moe(**text).to_dict(), "vision_config": HYBRID_VISION}
    return Qwen3_5MoeConfig(**parts, tie_word_embeddings=False)


FAMILIES: dict[str, tuple[Any, Any]] = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma3_that_sees": (_gemma3_that_sees, Gemma3ForConditionalGeneration),
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "mistral3": (_mistral3, Mistral3ForConditionalGeneration),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_5": (_qwen3_5, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (_qwen3_5_moe, Qwen3_5MoeForCausalLM),
    "qwen3_5_moe_that_sees": (_qwen3_5_moe_that_sees, Qwen3_5MoeForConditionalGeneration),
    "qwen3_5_that_sees": (_qwen3_5_that_sees, Qwen3_5ForConditionalGeneration),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
GROUP_SIZE = 32


ROUTER = ".gate"
"""What the name of a router ends with."""


def layers_at_4_bits(module: str) -> int:
    """All of the text part but lm_head, routers and the small gates of shared experts and gated delta layers."""
    is_plain = module.endswith(("lm_head", ROUTER, ".shared_expert_gate", "in_proj_a", "in_proj_b"))
    return 0 if is_plain or any(part in module for part in ("vision", "visual", "projector")) else 4


def save_tiny(
    folder: Path,
    family: str = "llama",
    *,
    is_quantized: bool = False,
    bits_of: Callable[[str], int] = layers_at_4_bits,
    is_stacked: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a two-layer random model (float32, or quantised to GPTQ) and return transformers' own, float32, of the
    weights that the file stands for. bits_of: bits of each linear module when quantised, 0 for plain; is_stacked:
    plain experts are saved as transformers holds them, all of a layer in one tensor.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    make_config, make_model = FAMILIES[family]
    model: PreTrainedModel = make_model(make_config(**{**settings, **overrides}))
    torch.nn.Module.eval(model)
    with torch.no_grad():  # norms and biases that matter, not ones and zeros
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
    model.save_pretrained(folder, save_original_format=not is_stacked)
    if is_quantized:
        _save_quantized(folder, model, bits_of)
    return model


def save_tiny_llama(folder: Path, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    return save_tiny(folder, "llama", seed=seed, **overrides)


def _save_quantized(folder: Path, model: PreTrainedModel, bits_of: Callable[[str], int]) -> None:
    """Round the linear modules to asymmetric groups, in the model and in the folder; `dynamic` names exceptions."""
    tensors = dict(model.state_dict())
    linears = linear_weights(model)
    # Routers and experts under the names that checkpoints have.
    tensors = {name: t for name, t in tensors.items() if ".experts." not in name and f"{ROUTER}.weight" not in name}
    tensors |= {f"{name}.weight": weight for name, weight in linears.items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    usual = Counter(bits for bits in map(bits_of, linears) if bits).most_common(1)[0][0]
    dynamic: dict[str, dict[str, int]] = {}
    for name, weight in linears.items():
        bits = bits_of(name)
        if bits != usual:
            pattern = f"{re.escape(name)}$"
            dynamic |= {pattern: {"bits": bits}} if bits else {f"-:{pattern}": {}}
        if bits:
            order = torch.arange(weight.shape[1]) // GROUP_SIZE
            codes, zeros, scales = round_to_groups(weight.t(), bits)
            with torch.no_grad():
                weight.copy_(exact_weight(codes, zeros, scales, order))
            tensors.pop(f"{name}.weight", None)
            tensors |= gptq_tensors(codes, gptqmodel_zero_words(zeros, bits), scales, order, name, bits)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = gptq_config(GROUP_SIZE, bits=usual, dynamic=dynamic)
    (folder / "config.json").write_text(json.dumps(config))


def linear_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Views of all linear modules' weights [N, K], of experts one by one, under the names that checkpoints have."""
    is_mixtral = model.config.model_type == "mixtral"
    parts = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    weights: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith(ROUTER):
            weights[name] = module.weight.detach()
        elif name.endswith(".mlp.experts"):
            for index, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
                gate, up = gate_up.detach().chunk(2)
                for part, weight in zip(parts, (gate, up, down.detach()), strict=True):
                    weights[f"{name}.{index}.{part}"] = weight
    return {n.replace(".mlp.", ".block_sparse_moe."): w for n, w in weights.items()} if is_mixtral else weights


def round_to_groups(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zero points [G, N] and fp16 scales [G, N] of weight [K, N]."""
    highest = (1 << bits) - 1
    groups = weight.reshape(-1, GROUP_SIZE, weight.shape[1])
    low, high = groups.amin(1).clamp(max=-1e-3), groups.amax(1).clamp(min=1e-3)
    scales = ((high - low) / highest).half()
    zeros = (-low / scales).round().clamp(1, highest).long()
    codes = (groups / scales.unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, highest).long()
    return codes.flatten(0, 1), zeros, scales
