"""AWQ's tensors from given integers, one layout a function (independent of quant/formats).

codes [K, N], zeros [G, N] or None (none are stored), scales [G, N]; the tensors are named after their module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.quant.writers import pack

Writer = Callable[[str, Tensor, "Tensor | None", Tensor], dict[str, Tensor]]


def gemm_words(codes: Tensor) -> Tensor:
    """AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of every eight, least significant first."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return pack(codes.view(codes.shape[0], -1, 8)[:, :, order].reshape(codes.shape), 1)


def gemm(module: str, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> dict[str, Tensor]:
    tensors = {f"{module}.qweight": gemm_words(codes), f"{module}.scales": scales}
    if zeros is not None:
        tensors[f"{module}.qzeros"] = gemm_words(zeros)
    return tensors


def gemv(module: str, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> dict[str, Tensor]:
    padding = _padding(codes, scales)
    tensors = {f"{module}.qweight": pack(codes.t(), 1), f"{module}.scales": torch.cat([scales, padding]).t()}
    if zeros is not None:
        tensors[f"{module}.qzeros"] = pack(torch.cat([zeros, padding.long()]).t(), 1)
    return tensors


def gemv_fast(
    module: str, codes: Tensor, zeros: Tensor | None, scales: Tensor, name: str = "qzeros"
) -> dict[str, Tensor]:
    """name: of the scaled zero points, which are rounded to the dtype of the scales."""
    rows, columns = codes.shape
    words = torch.zeros(columns // 4, rows, dtype=torch.int64)
    for k in range(rows):
        for r in range(4):
            words[:, k // 64 * 64 + 16 * r + 8 * (k % 64 // 32) + k % 8] += codes[k, r::4] << 4 * (k % 32 // 8)
    words = torch.where(words > 0x7FFF, words - 0x10000, words)
    padding = _padding(codes, scales)
    tensors = {f"{module}.qweight": words.to(torch.int16), f"{module}.scales": torch.cat([scales, padding])}
    if zeros is not None:
        scaled = -(scales.float() * zeros).to(scales.dtype)
        tensors[f"{module}.{name}"] = torch.cat([scaled, padding])
    return tensors


def llm_awq(module: str, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> dict[str, Tensor]:
    return gemv_fast(module, codes, zeros, scales, "scaled_zeros")


WRITERS: dict[str, Writer] = {"gemm": gemm, "gemv": gemv, "gemv_fast": gemv_fast, "llm-awq": llm_awq}


def exact(layout: str, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The weight [N, K] in float32 that a layout stands for: scales * (codes - zeros), its zero points rounded."""
    order = torch.arange(codes.shape[0]) // -(-codes.shape[0] // scales.shape[0])
    offsets = -scales.float() * zeros
    if layout in ("gemv_fast", "llm-awq"):
        offsets = offsets.to(scales.dtype).float()
    return (scales.float()[order] * codes + offsets[order]).t()


def round_to_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and fp16 scales of weight [N, K], to nearest."""
    groups = weight.detach().t().reshape(-1, group_size, weight.shape[0])
    low, high = groups.amin(1).clamp(max=-1e-3), groups.amax(1).clamp(min=1e-3)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15).long()
    codes = (groups / scales.unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, 15).long()
    return codes.flatten(0, 1), zeros, scales


def awq_config(group_size: int, **others: object) -> dict[str, object]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True} | others


def _padding(codes: Tensor, scales: Tensor) -> Tensor:
    """Zero rows after the scales: groups are padded to 8, those of 64 inputs to 16, those of 32 to 32."""
    groups, columns = scales.shape
    multiple = {32: 32, 64: 16}.get(codes.shape[0] // groups, 8)
    return torch.zeros(-groups % multiple, columns, dtype=scales.dtype)
