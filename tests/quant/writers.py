"""Small model folders for the tests: GPTQ words from given integers, and folders of given tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MODULE = "model.layers.0.mlp.up_proj"


def write_folder(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None = None) -> Path:
    """A folder with model.safetensors and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pack(codes: Tensor, dim: int) -> Tensor:
    """int32 words of 4-bit codes, least significant first, one nibble at a time (independent of packing.py)."""
    if dim == 1:
        return pack(codes.t(), 0).t().contiguous()
    words = torch.zeros(-(-codes.shape[0] // 8), codes.shape[1], dtype=torch.int64)
    for row, values in enumerate(codes.to(torch.int64)):
        words[row // 8] += values << 4 * (row % 8)
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def autogptq_zero_words(zeros: Tensor) -> Tensor:
    """AutoGPTQ's version 1: zero - 1 as uint32, shifted and or-ed, whatever spills over."""
    words = torch.zeros(zeros.shape[0], zeros.shape[1] // 8, dtype=torch.int64)
    for column, values in enumerate(zeros.to(torch.int64).t()):
        words[:, column // 8] |= ((values - 1) & 0xFFFFFFFF) << 4 * (column % 8) & 0xFFFFFFFF
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def gptqmodel_zero_words(zeros: Tensor) -> Tensor:
    """GPTQModel's version 1: the whole word minus 0x11111111, modulo 2**32."""
    words = (pack(zeros, 1).to(torch.int64) - 0x11111111) & 0xFFFFFFFF
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def random_integers(
    rows: int, columns: int, groups: int, *, zeros: tuple[int, int] = (1, 16)
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zero points [G, N] in range(*zeros), fp16 scales [G, N]."""
    generator = torch.Generator().manual_seed(rows * columns + groups)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    points = torch.randint(*zeros, (groups, columns), generator=generator)
    scales = torch.rand(groups, columns, generator=generator) * 0.1 + 0.001
    return codes, points, scales.half()


def gptq_tensors(
    codes: Tensor, zero_words: Tensor, scales: Tensor, order: Tensor | None, module: str = MODULE
) -> dict[str, Tensor]:
    """The tensors of one GPTQ module; order: [K] group of each row, None leaves g_idx out."""
    tensors = {f"{module}.qweight": pack(codes, 0), f"{module}.qzeros": zero_words, f"{module}.scales": scales}
    if order is not None:
        tensors[f"{module}.g_idx"] = order.to(torch.int32)
    return tensors


def gptq_config(group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False, "sym": False} | others


def exact_weight(codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> Tensor:
    """scales * (codes - zeros) in float64, [N, K]: with fp16 scales also exact in float32."""
    return (scales[order].double() * (codes - zeros[order]).double()).t()
