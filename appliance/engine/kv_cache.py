"""The paged KV cache: one tensor, its size in bytes, and how many blocks and tokens memory allows."""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.config import EngineConfig
from appliance.engine.block_manager import longest_request
from appliance.errors import UsageError
from appliance.kernels.backend import PagedLayout
from appliance.models.config import ModelConfig

CPU_SHARE = 0.25
"""Part of the available memory that the KV pool takes on a CPU unless told otherwise."""
CPU_DEFAULT_LIMIT = 4 << 30
GPU_RESERVE = 256 << 20
"""Left free on a card: what a desktop's windows may take later, and what the allocator loses to fragments."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes decided at load."""

    layout: PagedLayout
    max_model_len: int
    warnings: tuple[str, ...]


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, keys and values of all layers of a group."""
    return 2 * len(model.paged_groups[0].layers) * model.num_kv_heads * block_size * model.head_dim * dtype.itemsize


def step_bytes(model: ModelConfig, config: EngineConfig, vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes that the largest step is expected to take besides weights and cache: the widest moment of a layer, or of
    the logits of a whole chunk (someone wants all its log probabilities) and of what sampling makes of its rows.
    """
    tokens, size = config.max_num_batched_tokens, dtype.itemsize
    stream = 2 * tokens * model.hidden_size * size
    attention = model.hidden_size + (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = tokens * max(attention, model.mlp_row_values) * size
    logits = tokens * vocab_size * size
    # float32: scores, their softmax, a sorted copy and its order (int64).
    sampling = min(config.max_num_seqs, tokens) * vocab_size * (3 * 4 + 8)
    return stream + max(layer, logits + sampling)


def pool_bytes_on_cpu(available_bytes: int) -> int:
    return min(int(available_bytes * CPU_SHARE), CPU_DEFAULT_LIMIT)


def plan_cache(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, available_bytes: int, pool_bytes: int
) -> CachePlan:
    """How many blocks, and the context they allow. A wish beyond the model or the pool is cut, with a warning.

    pool_bytes: size of the pool where the configuration names none. Raises UsageError if not even one block fits.
    """
    block_bytes = bytes_per_block(model, config.block_size, dtype)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        num_blocks = max(config.kv_cache_bytes or pool_bytes, 0) // block_bytes
    if num_blocks < 1 or num_blocks * block_bytes > available_bytes:
        raise UsageError(
            f"The KV cache would take {num_blocks} blocks of {block_bytes:,} bytes and {available_bytes:,} bytes of "
            "memory are free: give it at least one block and at most what is free (--kv-cache-memory)."
        )
    wish = config.max_model_len or model.max_position
    windows = [group.window for group in model.paged_groups]
    longest = longest_request(windows, config.block_size, num_blocks, config.max_num_batched_tokens)
    max_model_len = min(wish, model.max_position, longest)
    warnings = []
    if max_model_len < wish:
        limit = f"what the KV cache of {num_blocks} blocks holds (--kv-cache-memory makes it larger)"
        if max_model_len == model.max_position:
            limit = "the longest of this model"
        warnings.append(f"The context of {wish} tokens was reduced to {max_model_len}, {limit}.")
    layout = PagedLayout(num_blocks, model.num_kv_heads, config.block_size, model.head_dim)
    return CachePlan(layout, max_model_len, tuple(warnings))


def allocate_cache(layout: PagedLayout, group_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers of a group, 2, num_blocks, num_kv_heads, block_size, head_dim] of zeros.

    On a CPU only what is written takes memory.
    """
    shape = (group_size, 2, layout.num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous pages are zero when first touched, so masked slots never hold NaN. Small pages: a fresh block touches
    # every layer's part of the pool, and zeroing a huge page for each made a prefill step 5 times slower to write.
    storage = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        storage.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(storage, dtype=dtype).view(shape)
