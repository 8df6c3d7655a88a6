"""Small model folders for the tests: GPTQ words from given integers, and folders of given tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
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


def pack(codes: Tensor, dim: int, bits: int = 4, width: int = 32) -> Tensor:
    """Words of `width` bits as one little-endian string of bits a line along `dim` (independent of packing.py)."""
    if dim == 1:
        return pack(codes.t(), 0, bits, width).t().contiguous()
    count = -(-codes.shape[0] * bits // width)
    columns = []
    for column in codes.t().tolist():
        string = sum(code << bits * row for row, code in enumerate(column))
        columns.append(np.frombuffer(string.to_bytes(count * width // 8, "little"), f"<i{width // 8}"))
    return torch.from_numpy(np.stack(columns, 1))


def autogptq_zero_words(zeros: Tensor, bits: int = 4) -> Tensor:
    """AutoGPTQ's version 1: zero - 1 as uint32, shifted and or-ed, whatever spills over inside a word."""
    words = torch.zeros(zeros.shape[0], zeros.shape[1] * bits // 32, dtype=torch.int64)
    for column, values in enumerate(zeros.to(torch.int64).t()):
        word, shift = divmod(bits * column, 32)
        less_one = (values - 1) & 0xFFFFFFFF
        words[:, word] |= less_one << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[:, word + 1] |= (less_one & (1 << bits) - 1) >> (32 - shift)
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def gptqmodel_zero_words(zeros: Tensor, bits: int = 4, width: int = 32) -> Tensor:
    """GPTQModel's version 1: whole words less a one in every field; 3-bit fields, which straddle, each less one."""
    if width % bits:
        return pack((zeros - 1) % (1 << bits), 1, bits, width)
    words = pack(zeros, 1, bits, width).numpy()
    ones = np.array(sum(1 << shift for shift in range(0, width, bits)), words.dtype)
    return torch.from_numpy(words - ones)


def random_integers(
    rows: int, columns: int, groups: int, *, zeros: tuple[int, int] | None = None, bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zero points [G, N] in range(*zeros) (from 1 on unless given), fp16 scales [G, N]."""
    generator = torch.Generator().manual_seed(rows * columns + groups)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    points = torch.randint(*(zeros or (1, 1 << bits)), (groups, columns), generator=generator)
    scales = torch.rand(groups, columns, generator=generator) * 0.1 + 0.001
    return codes, points, scales.half()


def gptq_tensors(
    codes: Tensor, zero_words: Tensor, scales: Tensor, order: Tensor | None, module: str = MODULE, bits: int = 4
) -> dict[str, Tensor]:
    """The tensors of one GPTQ module, in words as wide as `zero_words`; order: [K] group of each row, None leaves g_idx
    out."""
    words = pack(codes, 0, bits, 8 * zero_words.element_size())
    tensors = {f"{module}.qweight": words, f"{module}.qzeros": zero_words, f"{module}.scales": scales}
    if order is not None:
        tensors[f"{module}.g_idx"] = order.to(torch.int32)
    return tensors


def gptq_config(group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False, "sym": False} | others


def exact_weight(codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> Tensor:
    """scales * (codes - zeros) in float64, [N, K]: with fp16 scales also exact in float32."""
    return (scales[order].double() * (codes - zeros[order]).double()).t()
