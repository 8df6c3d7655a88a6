"""What every paged attention must compute: one query row at a time, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention(
    cache: Tensor,
    q: Tensor,
    position: int,
    block_table: Sequence[int],
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Output [num_heads, head_dim] float32 of one query row at `position`.

    cache: [2, num_blocks, num_kv_heads, block_size, head_dim]; q: [num_heads, head_dim];
    window: how many positions it attends to, its own included; scale: None for 1 / sqrt(head_dim); soft_cap: scaled
    scores s become soft_cap * tanh(s / soft_cap).
    """
    num_kv_heads, block_size, head_dim = cache.shape[2:]
    first = max(0, position + 1 - window) if window else 0
    slots = [(block_table[p // block_size], p % block_size) for p in range(first, position + 1)]
    keys = torch.stack([cache[0, block, :, offset] for block, offset in slots], 1).float()  # [kv heads, L, head_dim]
    values = torch.stack([cache[1, block, :, offset] for block, offset in slots], 1).float()
    queries = q.float().view(num_kv_heads, -1, head_dim)
    scores = queries @ keys.transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores, -1)
    return (weights @ values).reshape(q.shape)


def paged_decode(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    window: int = 0,
    num_splits: int = 1,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Output [B, num_heads, head_dim] float32 of one row a request; zero where a request has no tokens."""
    out = torch.zeros(q.shape)
    for i, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            out[i] = paged_attention(cache, q[i], seq_len - 1, block_tables[i].tolist(), window, scale, soft_cap)
    return out


def paged_prefill(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    window: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Output [T, num_heads, head_dim] float32 of chunks that end their contexts."""
    out = torch.zeros(q.shape)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        for row in range(starts[i], starts[i + 1]):
            position = seq_len - starts[i + 1] + row
            out[row] = paged_attention(cache, q[row], position, block_tables[i].tolist(), window, scale, soft_cap)
    return out
