"""Paged attention as Triton kernels: decode split over the context with a combine, and prefill over earlier blocks.

A program handles one kv head and BLOCK_M rows: row r is query token r // QUERIES, query head r % QUERIES of the kv
head (QUERIES is their number padded to a power of two), so that all queries of a kv head read its tiles once. Lengths
are read on the device and grids come from sizes that the caller fixes, so a launch can be captured. Softmax and sums
are fp32. Run under Triton's interpreter and compiled offline only: tiles are not tuned, nothing was measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance.kernels.triton_common import dot, jit

LOG2_E = 1.4426950408889634
DECODE_TOKENS, PREFILL_TOKENS = 64, 32
"""Cached tokens that one iteration of each kernel attends to."""


@jit
def _attend(
    q: tl.tensor,
    positions: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HAS_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Rows q [BLOCK_M, DIMS] at `positions` over cached tokens [start, stop): unnormalised sums, maxima, weights.

    scale, soft_cap: as `_score_factors` gives them. A row sees tokens up to its position, the last `window` of them
    unless window is 0. Slots before `start` and from `stop` on are not read: they may hold NaN, or have no block any
    more.
    """
    dims = tl.arange(0, DIMS)
    in_head = dims < HEAD_DIM
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, DIMS), tl.float32)
    for first in tl.range(start, stop, TOKENS, num_stages=STAGES):
        tokens = first + tl.arange(0, TOKENS)
        exists = tokens < stop
        block = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        offsets = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + tokens % BLOCK_SIZE) * HEAD_DIM
        keys = tl.load(keys_ptr + offsets[None, :] + dims[:, None], mask=exists[None, :] & in_head[:, None], other=0.0)
        scores = dot(q, keys, tl.zeros((BLOCK_M, TOKENS), tl.float32)) * scale
        if HAS_CAP:  # tanh(x) is 2 / (1 + exp(-2 * x)) - 1; dividing takes a call and registers that are not there
            root = tl.rsqrt(1.0 + tl.exp2(-scores))
            scores = soft_cap * (2.0 * root * root - 1.0)
        visible = exists[None, :] & (tokens[None, :] <= positions[:, None])
        if window > 0:
            visible &= tokens[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen nothing yet keeps a maximum of -inf, from which nothing may be subtracted.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - shift)
        weights = tl.exp2(scores - shift[:, None])
        values = tl.load(
            values_ptr + offsets[:, None] + dims[None, :], mask=exists[:, None] & in_head[None, :], other=0.0
        )
        weight = weight * decay + tl.sum(weights, 1)
        sums = dot(weights.to(values.dtype), values, sums * decay[:, None])
        maximum = new_maximum
    return sums, maximum, weight


@jit
def paged_decode_kernel(
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    part_maxima_ptr: tl.tensor,
    part_weights_ptr: tl.tensor,
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    stride_q: tl.tensor,
    stride_table: tl.tensor,
    HAS_CAP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One request, kv head and split. With one split the answer is stored, else its part for the combine."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    start = tl.where(window > 0, tl.maximum(seq_len - window, 0), 0)
    length = tl.cdiv(tl.cdiv(seq_len - start, TOKENS), NUM_SPLITS) * TOKENS
    start += split * length
    stop = tl.minimum(start + length, seq_len)

    QUERIES: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIMS)
    heads = head * QUERIES + rows
    is_query = rows < QUERIES
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + request * stride_q + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    positions = tl.full((BLOCK_M,), 0, tl.int32) + (seq_len - 1)
    sums, maximum, weight = _attend(
        q,
        positions,
        start,
        stop,
        keys_ptr,
        values_ptr,
        block_tables_ptr + request * stride_table,
        head,
        scale,
        soft_cap,
        window,
        HAS_CAP,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_M,
        TOKENS,
        DIMS,
        STAGES,
    )
    target = request * NUM_HEADS + heads
    if NUM_SPLITS == 1:
        answer = sums / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out_ptr + target[:, None] * HEAD_DIM + dims[None, :], answer.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = target * NUM_SPLITS + split
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
        tl.store(part_maxima_ptr + part, maximum, mask=is_query)
        tl.store(part_weights_ptr + part, weight, mask=is_query)


@jit
def combine_kernel(
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    part_maxima_ptr: tl.tensor,
    part_weights_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One request and query head: the parts of its splits, each with its own maximum, made one answer."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    exists = splits < NUM_SPLITS
    maxima = tl.load(part_maxima_ptr + row * NUM_SPLITS + splits, mask=exists, other=float("-inf"))
    weights = tl.load(part_weights_ptr + row * NUM_SPLITS + splits, mask=exists, other=0.0)
    maximum = tl.max(maxima, 0)
    factors = tl.exp2(maxima - tl.where(maximum == float("-inf"), 0.0, maximum))
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(parts_ptr + offsets, mask=mask, other=0.0)
    weight = tl.sum(weights * factors, 0)
    answer = tl.sum(parts * factors[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dims, answer.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@jit
def paged_prefill_kernel(
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    stride_q: tl.tensor,
    stride_table: tl.tensor,
    HAS_CAP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """BLOCK_M // QUERIES query tokens of one request's chunk, one kv head."""
    request = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    first_row = tl.load(query_start_loc_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + request + 1) - first_row).to(tl.int32)
    first_token = tl.program_id(0) * (BLOCK_M // QUERIES)
    if first_token < query_len:
        GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, DIMS)
        tokens = first_token + rows // QUERIES
        in_group = rows % QUERIES
        mask = ((tokens < query_len) & (in_group < GROUP))[:, None] & (dims < HEAD_DIM)[None, :]
        positions = seq_len - query_len + tokens
        last = tl.minimum(seq_len - query_len + first_token + BLOCK_M // QUERIES, seq_len)
        first_seen = tl.maximum(seq_len - query_len + first_token - window + 1, 0)
        start = tl.where(window > 0, first_seen, 0)
        columns = (head * GROUP + in_group)[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + (first_row + tokens)[:, None] * stride_q + columns, mask=mask, other=0.0)
        sums, _, weight = _attend(
            q,
            positions,
            start,
            last,
            keys_ptr,
            values_ptr,
            block_tables_ptr + request * stride_table,
            head,
            scale,
            soft_cap,
            window,
            HAS_CAP,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_M,
            TOKENS,
            DIMS,
            STAGES,
        )
        answer = sums / tl.where(weight > 0, weight, 1.0)[:, None]
        target = (first_row + tokens)[:, None] * (NUM_HEADS * HEAD_DIM) + columns
        tl.store(out_ptr + target, answer.to(out_ptr.dtype.element_ty), mask=mask)


def _score_factors(head_dim: int, scale: float | None, soft_cap: float | None) -> tuple[float, float]:
    """What products are multiplied by, and where they are capped at, so that 2 to their power is softmax's weight.

    Capped ones are first multiplied to be the power of 2 that tanh is made of.
    """
    scale = LOG2_E * (head_dim**-0.5 if scale is None else scale)
    return (scale, 0.0) if soft_cap is None else (2.0 * scale / soft_cap, LOG2_E * soft_cap)


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
    """Output [B, num_heads, head_dim] of one query row a request, q [B, num_heads, head_dim] at position seq_len - 1.

    cache: [2, num_blocks, num_kv_heads, block_size, head_dim], the rows' own keys and values stored. block_tables:
    [B, blocks] int32; seq_lens: [B] int32, 0 for a bucket's padding, whose output is zero. window: tokens that a row
    sees, itself included, 0 for all. num_splits: parts of the context computed beside each other. scale: of the scores,
    None for 1 / sqrt(head_dim); soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap), None for as they are.
    """
    batch, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    assert cache.is_contiguous()
    assert q.stride()[1:] == (head_dim, 1), "the heads of a row lie in a row"
    out = q.new_empty(batch, num_heads, head_dim)
    parts = q.new_empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32) if num_splits > 1 else out
    maxima, weights = q.new_empty((2, batch, num_heads, num_splits), dtype=torch.float32)
    dims = max(16, triton.next_power_of_2(head_dim))
    paged_decode_kernel[(batch, num_kv_heads, num_splits)](
        out,
        parts,
        maxima,
        weights,
        q,
        cache[0],
        cache[1],
        block_tables,
        seq_lens,
        *_score_factors(head_dim, scale, soft_cap),
        window,
        q.stride(0),
        block_tables.stride(0),
        HAS_CAP=soft_cap is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        BLOCK_M=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        TOKENS=DECODE_TOKENS,
        DIMS=dims,
        STAGES=2,
        num_warps=4,
    )
    if num_splits > 1:
        combine_kernel[(batch * num_heads,)](
            out,
            parts,
            maxima,
            weights,
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            SPLITS=triton.next_power_of_2(num_splits),
            DIMS=dims,
        )
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
    """Output [T, num_heads, head_dim] of B chunks, q [T, num_heads, head_dim] back to back.

    Chunk i is rows query_start_loc[i] to query_start_loc[i + 1], the last tokens of a context of seq_lens[i], all of
    whose keys and values are in the cache. query_start_loc: [B + 1] int32; max_query_len: no chunk has more rows (a
    bucket's size). Rows of no chunk are left as they are found in new memory. The rest as for `paged_decode`.
    """
    _, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    assert cache.is_contiguous()
    assert q.stride()[1:] == (head_dim, 1), "the heads of a row lie in a row"
    queries = triton.next_power_of_2(num_heads // num_kv_heads)
    block_m = max(64, queries)
    out = q.new_empty(q.shape)
    paged_prefill_kernel[(triton.cdiv(max_query_len, block_m // queries), num_kv_heads, seq_lens.shape[0])](
        out,
        q,
        cache[0],
        cache[1],
        block_tables,
        seq_lens,
        query_start_loc,
        *_score_factors(head_dim, scale, soft_cap),
        window,
        q.stride(0),
        block_tables.stride(0),
        HAS_CAP=soft_cap is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        QUERIES=queries,
        BLOCK_M=block_m,
        TOKENS=PREFILL_TOKENS,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        STAGES=2,
        num_warps=4,
    )
    return out
