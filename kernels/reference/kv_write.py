"""What storing keys and values must do, one row at a time."""

from __future__ import annotations

from torch import Tensor


def kv_write(cache: Tensor, keys_and_values: Tensor, slot_mapping: Tensor) -> None:
    """Store keys_and_values [T, 2 * num_kv_heads, head_dim] in cache [2, blocks, kv heads, block_size, head_dim]."""
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    for row, slot in zip(keys_and_values, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            cache[:, slot // block_size, :, slot % block_size] = row.view(2, num_kv_heads, head_dim)
