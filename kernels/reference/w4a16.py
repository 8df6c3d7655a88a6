"""What the packed 4-bit layout means and what its kernel must compute, one nibble plane at a time in plain float32."""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.kernels.w4a16_pack import ONE_GROUP, SYMMETRIC_ZERO, TILE, PackedW4


def unpack_w4(weight: PackedW4) -> Tensor:
    """The dense weight [K, N] float32, rows in the packed order."""
    k_blocks, n_tiles = weight.words.shape[:2]
    words = weight.words.int() & 0xFFFF
    codes = torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], 1)  # [k_blocks, 4, n_tiles, 32, 128]
    codes = codes.transpose(2, 3).reshape(k_blocks * TILE, n_tiles * TILE)
    rows = codes.shape[0] if weight.group_size == ONE_GROUP else weight.group_size
    offsets = -SYMMETRIC_ZERO * weight.scales if weight.offsets is None else weight.offsets
    dense = codes * weight.scales.repeat_interleave(rows, 0) + offsets.repeat_interleave(rows, 0)
    return dense[: weight.K, : weight.N]


def w4a16(x: Tensor, weight: PackedW4, bias: Tensor | None = None) -> Tensor:
    """y [M, N] float32."""
    y = x.float() @ unpack_w4(weight)
    return y if bias is None else y + bias.float()
