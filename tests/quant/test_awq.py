"""AWQ gemm beyond what autoawq writes: zero points of 0, odd sizes, missing declarations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.writers import MODULE, exact_weight, pack, random_integers, write_folder


def awq_words(codes: Tensor) -> Tensor:
    """AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of every eight, least significant first."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return pack(codes.view(codes.shape[0], -1, 8)[:, :, order].reshape(codes.shape), 1)


@pytest.mark.parametrize(("rows", "group_size"), [(128, 32), (160, 128), (128, -1), (96, 64)])
@pytest.mark.parametrize("declared", [True, False])
def test_zero_points_are_taken_as_they_are(tmp_path: Path, rows: int, group_size: int, declared: bool) -> None:
    size = rows if group_size == -1 else group_size
    codes, zeros, scales = random_integers(rows, 64, -(-rows // size), zeros=(0, 16))
    zeros[0, :8] = 0
    quantization = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    tensors = {f"{MODULE}.qweight": awq_words(codes), f"{MODULE}.qzeros": awq_words(zeros), f"{MODULE}.scales": scales}
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, quantization if declared else None))
    weight = checkpoint.linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize().double(), exact_weight(codes, zeros, scales, torch.arange(rows) // size))
    assert weight.zeros is not None
    assert torch.equal(weight.zeros, zeros.int())
    assert checkpoint.report.group_size == group_size
