"""The attention of one step through the Triton kernels. Run interpreted and compiled offline only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from appliance.kernels.backend import PagedLayout
from appliance.kernels.triton_kv_write import kv_write
from appliance.kernels.triton_paged_attention import paged_decode, paged_prefill

NUM_SPLITS = 8
"""Parts of a decode's context, whatever the step: a row's sums do not depend on how many rows run beside it."""


class TritonAttention:
    """Built once a step, used by every layer, as `CpuAttention` is. Rows are decodes first, then prefill chunks.

    slot_mapping: [T] int64, block * block_size + offset of each row, on the device that computes.
    query_start_loc: B + 1 row offsets; seq_lens: B total lengths after the step; block_tables: B lists of block ids.
    num_decode: how many of the B requests are decodes (one row each).
    """

    def __init__(
        self,
        layout: PagedLayout,
        slot_mapping: Tensor,
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        num_decode: int,
    ) -> None:
        device = slot_mapping.device
        self.num_decode = num_decode
        self.slot_mapping = slot_mapping
        width = max((-(-length // layout.block_size) for length in seq_lens), default=0)
        tables = [[*table[:width], *[0] * (width - len(table))] for table in block_tables]
        self.block_tables = torch.tensor(tables, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        starts = query_start_loc[num_decode:]
        self.query_start_loc = torch.tensor([s - num_decode for s in starts], dtype=torch.int32, device=device)
        self.max_query_len = max((b - a for a, b in pairwise(starts)), default=0)

    def write(self, cache: Tensor, keys_and_values: Tensor) -> None:
        """Store a step's keys and values, [T, 2 * num_kv_heads, head_dim], keys first."""
        kv_write(cache, keys_and_values, self.slot_mapping)

    def attend(
        self,
        cache: Tensor,
        q: Tensor,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads * head_dim], as `Attention.attend` says."""
        split, seen = self.num_decode, window or 0
        parts = []
        if split:
            tables, seq_lens = self.block_tables[:split], self.seq_lens[:split]
            parts.append(paged_decode(q[:split], cache, tables, seq_lens, seen, NUM_SPLITS, scale, soft_cap))
        if self.max_query_len:
            tables, seq_lens = self.block_tables[split:], self.seq_lens[split:]
            starts, longest = self.query_start_loc, self.max_query_len
            parts.append(paged_prefill(q[split:], cache, tables, seq_lens, starts, longest, seen, scale, soft_cap))
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).flatten(1)
