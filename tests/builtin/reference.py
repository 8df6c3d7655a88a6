"""The built-in model in transformers, on the dequantised weights that the appliance serves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight


def load_reference(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Raises if any tensor is missing or left over."""
    checkpoint = open_checkpoint(folder)
    config = LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "architectures"})
    model = LlamaForCausalLM(config)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        module = name.removesuffix(".weight")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            state[name] = checkpoint.tensor("model.embed_tokens.weight").float()
        elif checkpoint.has_module(module) and "norm" not in name and "embed" not in name:
            weight = checkpoint.linear(module)
            state[name] = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float()
        else:
            state[name] = checkpoint.tensor(name).float()
    model.load_state_dict(state)
    checkpoint.close()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    torch.nn.Module.eval(model)
    return model
