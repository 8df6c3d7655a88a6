"""Paged attention on the CPU equals the one-row reference, whatever the step mixes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from appliance.kernels.backend import PagedLayout
from appliance.kernels.cpu_attention import CpuAttention
from appliance.kernels.reference.paged_attention import paged_attention as reference

# fp32: another order of sums. bf16: 8 bits of output, weights rounded once before the values.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

# (context before the step, rows of the step) of each request, decodes first
STEPS = {
    "decodes": [(0, 1), (15, 1), (16, 1), (40, 1)],
    "whole-prompt": [(0, 37)],
    "one-token-prompt": [(0, 1)],
    "chunk-after-context": [(16, 5), (33, 16)],
    "mixed": [(47, 1), (3, 1), (0, 16), (20, 13)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 24), (5, 1, 16)])
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize("step", STEPS)
def test_attention_equals_the_reference(
    step: str, window: int | None, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    assert_equals_the_reference(step, window, num_heads, num_kv_heads, head_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("scale", "soft_cap"), [(0.5, None), (None, 2.0), (0.5, 1.5)])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("step", STEPS)
def test_scaled_and_capped_attention_equals_the_reference(
    step: str, window: int | None, scale: float | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    assert_equals_the_reference(step, window, 6, 2, 24, dtype, scale, soft_cap)


def assert_equals_the_reference(
    step: str,
    window: int | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> None:
    layout = PagedLayout(num_blocks=23, num_kv_heads=num_kv_heads, block_size=16, head_dim=head_dim)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    cache = torch.zeros(2, 23, num_kv_heads, 16, head_dim, dtype=dtype)
    free = torch.randperm(23, generator=generator).tolist()
    tables, slots, starts, seq_lens = [], [], [0], []
    for context, rows in STEPS[step]:
        table = [free.pop() for _ in range(-(-(context + rows) // 16))]
        for p in range(context):  # as earlier steps would have left it
            cache[:, table[p // 16], :, p % 16] = random(2, num_kv_heads, head_dim)
        slots += [table[p // 16] * 16 + p % 16 for p in range(context, context + rows)]
        tables.append(table)
        starts.append(starts[-1] + rows)
        seq_lens.append(context + rows)
    num_decode = sum(rows == 1 for _, rows in STEPS[step]) if step != "one-token-prompt" else 0
    attention = CpuAttention(layout, torch.tensor(slots), starts, seq_lens, tables, num_decode)

    keys_and_values = random(starts[-1], 2 * num_kv_heads, head_dim)
    attention.write(cache, keys_and_values)
    for row, slot in enumerate(slots):
        stored = cache[:, slot // 16, :, slot % 16].reshape(2 * num_kv_heads, head_dim)
        assert torch.equal(stored, keys_and_values[row])

    q = random(starts[-1], num_heads, head_dim)
    found = attention.attend(cache, q, window, scale, soft_cap).view(-1, num_heads, head_dim)
    for i, (context, rows) in enumerate(STEPS[step]):
        for j in range(rows):
            row = starts[i] + j
            expected = reference(cache, q[row], context + j, tables[i], window, scale, soft_cap)
            torch.testing.assert_close(found[row].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 17, 32])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_window_ends_with_its_oldest_position(rows: int, window: int) -> None:
    """transformers masking_utils: kv_idx > q_idx - window, so the last `window` positions and the row's own is one."""
    layout = PagedLayout(num_blocks=4, num_kv_heads=1, block_size=16, head_dim=8)
    cache = torch.randn(2, 4, 1, 16, 8, generator=torch.Generator().manual_seed(0))
    length, table = 50, [2, 0, 3, 1]
    slots = [table[p // 16] * 16 + p % 16 for p in range(length)]
    step = torch.tensor(slots[-rows:])

    def last_row(cache: Tensor) -> Tensor:
        attention = CpuAttention(layout, step, [0, rows], [length], [table], int(rows == 1))
        return attention.attend(cache, torch.ones(rows, 1, 8), window)[-1]

    for position in range(length):
        changed = cache.clone()
        changed[:, slots[position] // 16, :, slots[position] % 16] = 3.0
        is_seen = not torch.equal(last_row(changed), last_row(cache))
        assert is_seen == (position > length - 1 - window), position


def test_a_write_touches_no_other_slot() -> None:
    layout = PagedLayout(num_blocks=4, num_kv_heads=2, block_size=16, head_dim=8)
    cache = torch.full((2, 4, 2, 16, 8), 7.0)
    CpuAttention(layout, torch.tensor([35]), [0, 1], [4], [[2]], 1).write(cache, torch.zeros(1, 4, 8))
    assert int((cache == 0).sum()) == 2 * 2 * 8
    assert bool((cache[:, 2, :, 3] == 0).all())
