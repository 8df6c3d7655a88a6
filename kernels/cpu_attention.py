"""Paged attention on a CPU: gather a request's blocks with one index, then PyTorch's fused attention. Of a layer with a
window only the blocks that the window touches are gathered.

The cache of a layer is [2, num_blocks, num_kv_heads, block_size, head_dim], keys then values, so that a (block, head)
tile is one contiguous row: writing a step's keys and values is one op, and so is gathering those of all decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.backend import PagedLayout


def _capped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, soft_cap: float) -> Tensor:
    """PyTorch's fused attention has no soft cap. q [..., L, head_dim], keys and values [..., S, head_dim] -> q's shape.

    mask: added to the scores, in float32. Scores take 4 * L * S bytes for each of the leading dimensions.
    """
    scores = q.float() @ keys.float().transpose(-1, -2)
    scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap).add_(mask)
    return scores.softmax(-1).to(values.dtype) @ values


def _tile_rows(layout: PagedLayout, block_table: Tensor) -> Tensor:
    """Rows of the cache viewed as [2 * blocks * heads, ...] for block tables [B, n]: [2, B, heads, n]."""
    heads = torch.arange(layout.num_kv_heads).view(1, -1, 1)
    rows = block_table.unsqueeze(1) * layout.num_kv_heads + heads
    return torch.stack([rows, rows + layout.num_blocks * layout.num_kv_heads])


class _Prefill:
    """One request's chunk: rows [start, stop) of the step, attending to `seq_len` cached tokens, itself included."""

    def __init__(
        self,
        layout: PagedLayout,
        start: int,
        stop: int,
        seq_len: int,
        block_table: Sequence[int],
        window: int | None,
    ) -> None:
        self.rows = slice(start, stop)
        length, span = stop - start, min(window or seq_len, seq_len)
        first_block = max(seq_len - length - span + 1, 0) // layout.block_size
        self.num_keys = seq_len - first_block * layout.block_size
        blocks = torch.tensor(block_table[first_block : -(-seq_len // layout.block_size)]).unsqueeze(0)
        self.index = _tile_rows(layout, blocks).flatten()
        self.is_causal = length == span == seq_len and length > 1
        self.mask: Tensor | None = None
        if not self.is_causal:
            # A query sees the context before the chunk and the chunk up to itself, no further back than its window.
            before = self.num_keys - length
            self.mask = torch.ones(length, self.num_keys, dtype=torch.bool).tril(before)
            if span < seq_len:
                self.mask = self.mask.triu(before - span + 1)

    @cached_property
    def added_mask(self) -> Tensor:
        """[L, num_keys] float32 to be added to scores; `mask` says it to PyTorch's attention, in fewer bytes."""
        length = self.rows.stop - self.rows.start
        visible = torch.ones(length, length, dtype=torch.bool).tril() if self.mask is None else self.mask
        return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


class _Decodes:
    """The step's decodes, one row each, padded to the most blocks that one of them looks at."""

    def __init__(
        self,
        layout: PagedLayout,
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        starts = [max(length - (window or length), 0) for length in seq_lens]
        first_blocks = [start // layout.block_size for start in starts]
        tables = [
            list(table[first : -(-length // layout.block_size)])
            for table, first, length in zip(block_tables, first_blocks, seq_lens, strict=True)
        ]
        width = max(map(len, tables))
        self.index = _tile_rows(layout, torch.tensor([t + [0] * (width - len(t)) for t in tables])).flatten()
        positions = (
            torch.arange(width * layout.block_size) + torch.tensor(first_blocks).unsqueeze(1) * layout.block_size
        )
        start, stop = torch.tensor(starts).unsqueeze(1), torch.tensor(seq_lens).unsqueeze(1)
        seen = ((positions >= start) & (positions < stop)).view(len(tables), 1, 1, -1)
        # Added to scores: attention would make as much of a boolean mask again in every layer.
        self.mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


class CpuAttention:
    """The attention of one step: built once, used by every layer. Rows are decodes first, then prefill chunks.

    slot_mapping: [T] int64, block * block_size + offset of each row.
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
        self.layout = layout
        self.num_decode = num_decode
        block, offset = slot_mapping // layout.block_size, slot_mapping % layout.block_size
        heads = torch.arange(layout.num_kv_heads)
        rows = (block.unsqueeze(1) * layout.num_kv_heads + heads) * layout.block_size + offset.unsqueeze(1)
        span = layout.num_blocks * layout.num_kv_heads * layout.block_size
        self.write_rows = torch.cat([rows, rows + span], 1).flatten()  # [T * 2 * heads], keys then values of each row
        self._query_start_loc, self._seq_lens, self._block_tables = query_start_loc, seq_lens, block_tables
        self._plans: dict[int | None, tuple[_Decodes | None, list[_Prefill]]] = {}

    def _plan(self, window: int | None, dtype: torch.dtype) -> tuple[_Decodes | None, list[_Prefill]]:
        """What to gather and to mask, made once for all layers of a window."""
        if window not in self._plans:
            starts, lengths, tables, count = self._query_start_loc, self._seq_lens, self._block_tables, self.num_decode
            prefills = [
                _Prefill(self.layout, starts[i], starts[i + 1], lengths[i], tables[i], window)
                for i in range(count, len(lengths))
            ]
            decodes = _Decodes(self.layout, lengths[:count], tables[:count], window, dtype) if count else None
            self._plans[window] = decodes, prefills
        return self._plans[window]

    def write(self, cache: Tensor, keys_and_values: Tensor) -> None:
        """Store a step's keys and values, [T, 2 * num_kv_heads, head_dim], keys first."""
        cache.view(-1, self.layout.head_dim).index_copy_(0, self.write_rows, keys_and_values.flatten(0, 1))

    def attend(
        self,
        cache: Tensor,
        q: Tensor,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads * head_dim], as `Attention.attend` says."""
        decodes, prefills = self._plan(window, q.dtype)
        parts = [] if decodes is None else [self._decode(cache, q[: self.num_decode], decodes, scale, soft_cap)]
        parts += [self._prefill(cache, q, prefill, scale, soft_cap) for prefill in prefills]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _gather(self, cache: Tensor, index: Tensor, batch: int) -> Tensor:
        """Keys and values [2, B, num_kv_heads, tokens, head_dim] of the blocks at `index`."""
        layout = self.layout
        tiles = cache.view(-1, layout.block_size * layout.head_dim).index_select(0, index)
        return tiles.view(2, batch, layout.num_kv_heads, -1, layout.head_dim)

    def _decode(
        self, cache: Tensor, q: Tensor, decodes: _Decodes, scale: float | None, soft_cap: float | None
    ) -> Tensor:
        keys, values = self._gather(cache, decodes.index, self.num_decode)
        # The query heads that share a kv head are folded into the query length: no copy of keys for GQA.
        grouped = q.view(self.num_decode, self.layout.num_kv_heads, -1, self.layout.head_dim)
        if soft_cap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=decodes.mask, scale=scale)
        else:
            out = _capped_attention(grouped, keys, values, decodes.mask, self._scale(scale), soft_cap)
        return out.reshape(self.num_decode, -1)

    def _scale(self, scale: float | None) -> float:
        return self.layout.head_dim**-0.5 if scale is None else scale

    def _prefill(
        self, cache: Tensor, q: Tensor, prefill: _Prefill, scale: float | None, soft_cap: float | None
    ) -> Tensor:
        keys, values = self._gather(cache, prefill.index, 1)
        if soft_cap is not None:
            return self._capped_prefill(q, keys[0], values[0], prefill, self._scale(scale), soft_cap)
        q = q[prefill.rows].transpose(0, 1).unsqueeze(0)  # [1, num_heads, L, head_dim]
        out = F.scaled_dot_product_attention(
            q,
            keys[:, :, : prefill.num_keys],
            values[:, :, : prefill.num_keys],
            attn_mask=prefill.mask,
            is_causal=prefill.is_causal,
            scale=scale,
            enable_gqa=q.shape[1] != self.layout.num_kv_heads,
        )
        return out[0].transpose(0, 1).reshape(q.shape[2], -1)

    def _capped_prefill(
        self, q: Tensor, keys: Tensor, values: Tensor, prefill: _Prefill, scale: float, soft_cap: float
    ) -> Tensor:
        """keys, values: [num_kv_heads, tokens, head_dim]. One kv head after the other, to hold the scores of one."""
        num_kv_heads, seen = keys.shape[0], slice(prefill.num_keys)
        rows = q[prefill.rows].view(-1, num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])
        queries = rows.permute(1, 2, 0, 3)  # [kv heads, group, L, head_dim]
        out = [
            _capped_attention(queries[h], keys[h, seen], values[h, seen], prefill.added_mask, scale, soft_cap)
            for h in range(num_kv_heads)
        ]
        return torch.stack(out).permute(2, 0, 1, 3).flatten(1)
