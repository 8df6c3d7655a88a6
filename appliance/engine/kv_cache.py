"""The paged KV cache: one tensor, its size in bytes, and how many blocks and tokens memory allows. How many slots of
recurrent state it allows beside that.
"""

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
from appliance.models.recurrent_state import bytes_per_slot

CPU_SHARE = 0.25
"""Part of the available memory that the KV pool takes on a CPU unless told otherwise."""
CPU_DEFAULT_LIMIT = 4 << 30
STATE_SHARE = 0.5
"""Part of the pool that recurrent states may take, where they are too large for as many requests as are allowed."""
NUM_SNAPSHOTS = 8
"""State slots wished for beyond those of requests: snapshots for the prefix cache."""
GPU_RESERVE = 256 << 20
"""Left free on a card: what a desktop's windows may take later, and what the allocator loses to fragments."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes decided at load."""

    layout: PagedLayout
    max_model_len: int
    warnings: tuple[str, ...]
    num_state_slots: int = 0
    """Of recurrent layers; 0 where there are none."""


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
    if model.gated_delta is not None:  # float32 copies of q, k and v, and of what comes of v
        shape = model.gated_delta
        floats = 3 * shape.num_channels + 3 * shape.value_size
        attention = max(attention, model.hidden_size + floats * 4 // size)
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
    """How many blocks and state slots, and the context they allow. A wish beyond the model or the pool is cut, with a
    warning.

    pool_bytes: size of the pool where the configuration names none. Raises UsageError if not even one block fits.
    """
    pool_bytes = config.kv_cache_bytes or pool_bytes
    num_slots, slot_bytes, warnings = _plan_states(config, model, dtype, pool_bytes)
    available_bytes, pool_bytes = (size - num_slots * slot_bytes for size in (available_bytes, pool_bytes))
    block_bytes = bytes_per_block(model, config.block_size, dtype)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        num_blocks = max(pool_bytes, 0) // block_bytes
    if num_blocks < 1 or num_blocks * block_bytes > available_bytes:
        raise UsageError(
            f"The KV cache would take {num_blocks} blocks of {block_bytes:,} bytes and {available_bytes:,} bytes of "
            "memory are free: give it at least one block and at most what is free (--kv-cache-memory)."
        )
    wish = config.max_model_len or model.max_position
    windows = [group.window for group in model.paged_groups]
    longest = longest_request(windows, config.block_size, num_blocks, config.max_num_batched_tokens)
    max_model_len = min(wish, model.max_position, longest)
    if max_model_len < wish:
        limit = f"what the KV cache of {num_blocks} blocks holds (--kv-cache-memory makes it larger)"
        if max_model_len == model.max_position:
            limit = "the longest of this model"
        warnings.append(f"The context of {wish} tokens was reduced to {max_model_len}, {limit}.")
    layout = PagedLayout(num_blocks, model.num_kv_heads, config.block_size, model.head_dim)
    return CachePlan(layout, max_model_len, tuple(warnings), num_slots)


def state_bytes(model: ModelConfig, num_slots: int, dtype: torch.dtype) -> int:
    """Bytes of so many slots of recurrent state, of all layers; 0 where none is recurrent."""
    if model.gated_delta is None:
        return 0
    return num_slots * bytes_per_slot(model.gated_delta, len(model.recurrent_layers), dtype)


def _plan_states(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, pool_bytes: int
) -> tuple[int, int, list[str]]:
    """How many state slots, bytes of one, and what to warn about."""
    slot_bytes = state_bytes(model, 1, dtype)
    if not slot_bytes:
        return 0, 0, []
    wish = config.max_num_seqs + (NUM_SNAPSHOTS if config.enable_prefix_caching else 0)
    num_slots = max(min(wish, int(pool_bytes * STATE_SHARE) // slot_bytes), 1)
    warnings = []
    if num_slots < config.max_num_seqs:
        warnings.append(
            f"At most {num_slots} requests run at once instead of {config.max_num_seqs}: each takes {slot_bytes:,} "
            "bytes of recurrent state (--kv-cache-memory makes room for more)."
        )
    return num_slots, slot_bytes, warnings


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
