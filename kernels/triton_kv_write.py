"""Storing a step's keys and values in the paged cache, in Triton. Run interpreted and compiled offline only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from appliance.kernels.triton_common import jit


@jit
def kv_write_kernel(
    cache_ptr: tl.tensor,
    keys_and_values_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    num_blocks: tl.tensor,
    stride_token: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One token: its rows [2 * NUM_KV_HEADS, HEAD_DIM], padded to [ROWS, DIMS]. Offsets in the cache are int64."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIMS)
        mask = (rows < 2 * NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        source = token * stride_token + rows[:, None] * HEAD_DIM + dims[None, :]
        block = slot // BLOCK_SIZE + (rows // NUM_KV_HEADS).to(tl.int64) * num_blocks
        tile = block * NUM_KV_HEADS + rows % NUM_KV_HEADS
        target = (tile * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        values = tl.load(keys_and_values_ptr + source, mask=mask)
        tl.store(cache_ptr + target[:, None] + dims[None, :], values, mask=mask)


def kv_write(cache: Tensor, keys_and_values: Tensor, slot_mapping: Tensor) -> None:
    """Store keys_and_values [T, 2 * num_kv_heads, head_dim], keys first, at slot_mapping [T] int64.

    cache: [2, num_blocks, num_kv_heads, block_size, head_dim], contiguous. A slot is block * block_size + offset; rows
    whose slot is negative (a bucket's padding) are not stored.
    """
    _, num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    assert cache.is_contiguous()
    assert keys_and_values.shape[1:] == (2 * num_kv_heads, head_dim)
    assert keys_and_values.stride()[1:] == (head_dim, 1), "the heads of a token lie in a row"
    kv_write_kernel[(slot_mapping.shape[0],)](
        cache,
        keys_and_values,
        slot_mapping,
        num_blocks,
        keys_and_values.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        ROWS=triton.next_power_of_2(2 * num_kv_heads),
        DIMS=triton.next_power_of_2(head_dim),
    )
