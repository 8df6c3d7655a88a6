"""Tiny random checkpoints with known answers from transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save_tiny_llama(folder: Path, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Write a two-layer random Llama (float32) and return transformers' own model of it."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "tie_word_embeddings": False,
    }
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))
    torch.nn.Module.eval(model)
    with torch.no_grad():  # norms and biases that matter, not ones and zeros
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
    model.save_pretrained(folder)
    return model
