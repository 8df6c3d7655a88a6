"""compressed-tensors folders from given integers, packed bit by bit (independent of packing.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.quant.writers import MODULE


def words_of(codes: Tensor, bits: int, *, gaps: bool = False) -> Tensor:
    """int32 words of each row of unsigned codes [R, C]; gaps: no code straddles two words."""
    words = []
    for row in codes.tolist():
        text = 0
        for index, code in enumerate(row):
            per_word = 32 // bits
            position = index // per_word * 32 + index % per_word * bits if gaps else index * bits
            text |= code << position
        count = -(-len(row) // (32 // bits)) if gaps else -(-len(row) * bits // 32)
        values = [text >> 32 * word & 0xFFFFFFFF for word in range(count)]
        words.append([value - (1 << 32) if value >> 31 else value for value in values])
    return torch.tensor(words, dtype=torch.int32)


def compressed_tensors(
    codes: Tensor,
    zeros: Tensor | None,
    scales: Tensor,
    bits: int,
    *,
    gaps: bool = False,
    order: Tensor | None = None,
    module: str = MODULE,
) -> dict[str, Tensor]:
    """The tensors of one module. Unsigned codes [K, N] and zero points [G, N] (None: symmetric), scales [G, N];
    order: [K] group of each row."""
    tensors = {
        f"{module}.weight_packed": words_of(codes.t(), bits, gaps=gaps),
        f"{module}.weight_scale": scales.t().contiguous(),
        f"{module}.weight_shape": torch.tensor([codes.shape[1], codes.shape[0]]),
    }
    if zeros is not None:
        tensors[f"{module}.weight_zero_point"] = words_of(zeros, bits, gaps=gaps).t().contiguous()
    if order is not None:
        tensors[f"{module}.weight_g_idx"] = order.to(torch.int32)
    return tensors


def group(bits: int, group_size: int | None, *targets: str, **weights: Any) -> dict[str, Any]:
    """One of config_groups; group_size None is strategy channel, no targets are every linear layer."""
    strategy = "channel" if group_size is None else "group"
    return {
        "targets": list(targets or ("Linear",)),
        "weights": {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size}
        | weights,
        "input_activations": None,
    }


def compressed_config(*groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{number}": content for number, content in enumerate(groups)},
        "ignore": ["lm_head"],
    } | others
