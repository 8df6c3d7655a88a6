"""The Triton kernels of the paged cache, interpreted: equal to the references, whatever else the pool holds."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from appliance.kernels.reference import kv_write as kv_write_reference
from appliance.kernels.reference import paged_attention as reference
from appliance.kernels.triton_kv_write import kv_write
from appliance.kernels.triton_paged_attention import paged_decode, paged_prefill

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# fp32: another order of sums. fp16, bf16: the weights are rounded once before the values, the output once; the
# interpreter truncates to bf16.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# (num_heads, num_kv_heads, head_dim): grouped, one for all with an odd size, seven to one, none shared
HEADS = pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((9, 3, 64), torch.float32),
        ((5, 1, 24), torch.float32),
        ((7, 1, 32), torch.float32),
        ((6, 2, 32), torch.float16),
        ((2, 2, 24), torch.bfloat16),
    ],
    ids=str,
)


@dataclass(frozen=True)
class Pool:
    """A cache whose unwritten slots are NaN, with the requests' blocks scattered over it."""

    cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


def make_pool(seq_lens: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> Pool:
    generator = torch.Generator().manual_seed(sum(seq_lens))
    lengths = [-(-length // block_size) for length in seq_lens]
    cache = torch.full((2, sum(lengths) + 2, num_kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    free = torch.randperm(cache.shape[1], generator=generator).tolist()
    # Beyond a request's blocks a table holds an id far out of the pool, which must not be followed.
    tables = torch.full((len(seq_lens), max(*lengths, 1) + 1), 1 << 30, dtype=torch.int32)
    for i, (length, count) in enumerate(zip(seq_lens, lengths, strict=True)):
        table = [free.pop() for _ in range(count)]
        tables[i, :count] = torch.tensor(table, dtype=torch.int32)
        for p in range(length):
            values = torch.randn(2, num_kv_heads, head_dim, generator=generator)
            cache[:, table[p // block_size], :, p % block_size] = values.to(dtype)
    return Pool(cache, tables, torch.tensor(seq_lens, dtype=torch.int32))


def queries(rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of a wider tensor, as q lies in the fused q, k and v."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, num_heads + 3, head_dim, generator=generator).to(dtype)[:, :num_heads]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[found.dtype], rtol=TOLERANCE[found.dtype])


@HEADS
def test_decode_equals_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Lengths around a block and around the tokens of an iteration; one split and more than some contexts fill."""
    num_heads, num_kv_heads, head_dim = heads
    pool = make_pool([1, 17, 64, 131], num_kv_heads, head_dim, dtype)
    q = queries(4, num_heads, head_dim, dtype)
    expected = reference.paged_decode(q, pool.cache, pool.block_tables, pool.seq_lens)
    for num_splits in (1, 3):
        found = paged_decode(q, pool.cache, pool.block_tables, pool.seq_lens, num_splits=num_splits)
        assert found.dtype == dtype
        assert_close(found, expected)


@pytest.mark.parametrize("window", [1, 16, 50, 1000])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_decode_sees_its_window(window: int, num_splits: int) -> None:
    pool = make_pool([3, 16, 140], 2, 16, torch.float32)
    q = queries(3, 4, 16, torch.float32)
    arguments = (q, pool.cache, pool.block_tables, pool.seq_lens, window, num_splits)
    assert_close(paged_decode(*arguments), reference.paged_decode(*arguments))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_padding_of_a_bucket_is_zero(num_splits: int) -> None:
    """A request of no tokens reads nothing and yields zero, so that no NaN enters what follows."""
    pool = make_pool([5, 0, 0], 2, 16, torch.float16)
    q = queries(3, 4, 16, torch.float16)
    found = paged_decode(q, pool.cache, pool.block_tables, pool.seq_lens, num_splits=num_splits)
    assert_close(found, reference.paged_decode(q, pool.cache, pool.block_tables, pool.seq_lens))
    assert not found[1:].any()


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes(block_size: int) -> None:
    pool = make_pool([70, 5], 1, 16, torch.float32, block_size)
    q = queries(2, 2, 16, torch.float32)
    arguments = (q, pool.cache, pool.block_tables, pool.seq_lens)
    assert_close(paged_decode(*arguments), reference.paged_decode(*arguments))


# (context before the step, rows of the step) of each chunk
CHUNKS = {
    "whole": [(0, 37)],
    "single-rows": [(0, 1), (40, 1)],
    "after-context": [(16, 5), (33, 16), (0, 3)],
    "longer-than-a-tile": [(7, 71)],
}


def prefill_arguments(
    chunks: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    num_heads, num_kv_heads, head_dim = heads
    pool = make_pool([context + rows for context, rows in chunks], num_kv_heads, head_dim, dtype)
    starts = torch.tensor([0, *(rows for _, rows in chunks)]).cumsum(0).int()
    q = queries(int(starts[-1]), num_heads, head_dim, dtype)
    # A bucket's size, larger than any chunk.
    return q, pool.cache, pool.block_tables, pool.seq_lens, starts, max(rows for _, rows in chunks) + 20


@HEADS
@pytest.mark.parametrize("name", CHUNKS)
def test_prefill_equals_the_reference(name: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    arguments = prefill_arguments(CHUNKS[name], heads, dtype)
    found = paged_prefill(*arguments)
    assert found.dtype == dtype
    assert_close(found, reference.paged_prefill(*arguments))


@pytest.mark.parametrize("window", [1, 8, 33, 500])
def test_prefill_sees_its_window(window: int) -> None:
    arguments = prefill_arguments([(30, 40), (0, 9)], (4, 2, 16), torch.float32)
    assert_close(paged_prefill(*arguments, window), reference.paged_prefill(*arguments, window))


@pytest.mark.parametrize(("scale", "soft_cap"), [(0.7, None), (None, 2.0), (0.7, 1.5)])
def test_scores_are_scaled_and_capped(scale: float | None, soft_cap: float | None) -> None:
    pool = make_pool([3, 16, 70], 2, 16, torch.float32)
    q = queries(3, 4, 16, torch.float32)
    decode = (q, pool.cache, pool.block_tables, pool.seq_lens, 20, 2, scale, soft_cap)
    assert_close(paged_decode(*decode), reference.paged_decode(*decode))
    prefill = prefill_arguments([(30, 40), (0, 9)], (4, 2, 16), torch.float32)
    assert_close(paged_prefill(*prefill, 0, scale, soft_cap), reference.paged_prefill(*prefill, 0, scale, soft_cap))


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(3, 64, 16), (1, 24, 32), (5, 16, 64)])
def test_write_equals_the_reference(num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Every slot of the pool: those of the step, and all others as they were. Negative slots are skipped."""
    found = torch.full((2, 5, num_kv_heads, block_size, head_dim), 7.0, dtype=torch.float16)
    expected = found.clone()
    rows = queries(4, 2 * num_kv_heads, head_dim, torch.float16)
    slots = torch.tensor([block_size - 1, 3 * block_size + 5, -1, 5 * block_size - 1])
    kv_write(found, rows, slots)
    kv_write_reference.kv_write(expected, rows, slots)
    assert torch.equal(found, expected)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """Public bug vllm#47671: block * stride in 32 bits. The same request at the bottom and at the top of a big pool."""
    num_kv_heads, block_size, head_dim = 2, 16, 64
    num_blocks = (1 << 31) // (num_kv_heads * block_size * head_dim) + 5  # of keys alone; values lie beyond
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    no_reserve = 0x4000  # MAP_NORESERVE, which Python names from 3.13 on: only touched pages take memory
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    cache = torch.frombuffer(mmap.mmap(-1, 2 * math.prod(shape), flags=flags), dtype=torch.float16).view(shape)
    rows = queries(20, 2 * num_kv_heads, head_dim, torch.float16)
    q = queries(20, 4, head_dim, torch.float16)
    found = []
    for table in ([0, 1], [num_blocks - 1, num_blocks - 3]):
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(20)])
        kv_write(cache, rows, slots)
        for p in (0, 19):
            stored = cache[:, table[p // block_size], :, p % block_size]
            assert torch.equal(stored.reshape(2 * num_kv_heads, head_dim), rows[p])
        tables, seq_lens = torch.tensor([table], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
        starts = torch.tensor([0, 20], dtype=torch.int32)
        decoded = paged_decode(q[19:], cache, tables, seq_lens, num_splits=2)
        found.append(torch.cat([decoded, paged_prefill(q, cache, tables, seq_lens, starts, 20)]))
    assert torch.equal(found[0], found[1])
    assert bool(found[0].isfinite().all())
