"""What every paged attention must compute: one query row at a time, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention(
    cache: Tensor, q: Tensor, position: int, block_table: Sequence[int], window: int | None = None
) -> Tensor:
    """Output [num_heads, head_dim] float32 of one query row at `position`.

    cache: [2, num_blocks, num_kv_heads, block_size, head_dim]; q: [num_heads, head_dim];
    window: how many positions it attends to, its own included.
    """
    num_kv_heads, block_size, head_dim = cache.shape[2:]
    first = 0 if window is None else max(position + 1 - window, 0)
    slots = [(block_table[p // block_size], p % block_size) for p in range(first, position + 1)]
    keys = torch.stack([cache[0, block, :, offset] for block, offset in slots], 1).float()  # [kv heads, L, head_dim]
    values = torch.stack([cache[1, block, :, offset] for block, offset in slots], 1).float()
    queries = q.float().view(num_kv_heads, -1, head_dim)
    weights = torch.softmax(queries @ keys.transpose(1, 2) / math.sqrt(head_dim), -1)
    return (weights @ values).reshape(q.shape)
