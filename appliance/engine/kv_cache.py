"""The paged KV cache: one tensor, its size in bytes, and how many blocks and tokens memory allows."""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from appliance.config import EngineConfig
from appliance.errors import UsageError
from appliance.kernels.cpu_attention import PagedLayout
from appliance.models.config import ModelConfig

CPU_SHARE = 0.25
"""Part of the available memory that the KV pool takes on a CPU unless told otherwise."""
CPU_DEFAULT_LIMIT = 4 << 30


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes decided at load."""

    layout: PagedLayout
    max_model_len: int
    warnings: tuple[str, ...]


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * model.num_layers * model.num_kv_heads * block_size * model.head_dim * dtype.itemsize


def available_memory() -> int:
    """Bytes that can be allocated without swapping (MemAvailable of /proc/meminfo, cut to the cgroup's limit)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


def resident_memory() -> int:
    """Bytes of physical memory that this process holds (VmRSS of /proc/self/status)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def plan_cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, available_bytes: int) -> CachePlan:
    """How many blocks, and the context they allow. A wish beyond the model or the pool is cut, with a warning.

    Raises UsageError if not even one block fits.
    """
    block_bytes = bytes_per_block(model, config.block_size, dtype)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        pool_bytes = config.kv_cache_bytes or min(int(available_bytes * CPU_SHARE), CPU_DEFAULT_LIMIT)
        num_blocks = pool_bytes // block_bytes
    if num_blocks < 1 or num_blocks * block_bytes > available_bytes:
        raise UsageError(
            f"The KV cache would take {num_blocks} blocks of {block_bytes:,} bytes and {available_bytes:,} bytes of "
            "memory are free: give it at least one block and at most what is free (--kv-cache-memory)."
        )
    warnings = []
    max_model_len = min(model.max_position, num_blocks * config.block_size)
    if config.max_model_len is not None:
        if config.max_model_len > model.max_position:
            warnings.append(
                f"max_model_len {config.max_model_len} was reduced to {model.max_position}, the longest of this model."
            )
        # A context larger than the pool stays allowed: a prompt that cannot fit is refused by itself.
        max_model_len = min(config.max_model_len, model.max_position)
        if max_model_len > num_blocks * config.block_size:
            warnings.append(
                f"A context of {max_model_len} tokens is longer than the KV pool of "
                f"{num_blocks * config.block_size} tokens: longer prompts are refused."
            )
    layout = PagedLayout(num_blocks, model.num_kv_heads, config.block_size, model.head_dim)
    return CachePlan(layout, max_model_len, tuple(warnings))


def allocate_cache(layout: PagedLayout, num_layers: int, dtype: torch.dtype) -> Tensor:
    """[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim] of zeros, backed by memory only once written."""
    shape = (num_layers, 2, layout.num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    # Anonymous pages are zero when first touched, so masked slots never hold NaN. Small pages: a fresh block touches
    # every layer's part of the pool, and zeroing a huge page for each made a prefill step 5 times slower to write.
    storage = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        storage.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(storage, dtype=dtype).view(shape)
