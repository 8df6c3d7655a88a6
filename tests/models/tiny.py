"""Tiny random checkpoints with known answers from transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.quant.writers import exact_weight, gptq_config, gptq_tensors, gptqmodel_zero_words

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
GROUP_SIZE = 32


def save_tiny(
    folder: Path, family: str = "llama", *, is_quantized: bool = False, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Write a two-layer random model (float32, or its layers in 4-bit GPTQ) and return transformers' own, float32, of
    the weights that the file stands for."""
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
    model.save_pretrained(folder)
    if is_quantized:
        _save_quantized(folder, model)
    return model


def save_tiny_llama(folder: Path, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    return save_tiny(folder, "llama", seed=seed, **overrides)


def _save_quantized(folder: Path, model: PreTrainedModel) -> None:
    """Round every layer but lm_head to asymmetric 4-bit groups, in the model and in the folder."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            order = torch.arange(module.in_features) // GROUP_SIZE
            codes, zeros, scales = _round(module.weight.detach().t())
            with torch.no_grad():
                module.weight.copy_(exact_weight(codes, zeros, scales, order))
            del tensors[f"{name}.weight"]
            tensors |= gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, order, name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = gptq_config(GROUP_SIZE)
    (folder / "config.json").write_text(json.dumps(config))


def _round(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zero points [G, N] and fp16 scales [G, N] of weight [K, N]."""
    groups = weight.reshape(-1, GROUP_SIZE, weight.shape[1])
    low, high = groups.amin(1).clamp(max=-1e-3), groups.amax(1).clamp(min=1e-3)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(1, 15).long()
    codes = (groups / scales.unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, 15).long()
    return codes.flatten(0, 1), zeros, scales
