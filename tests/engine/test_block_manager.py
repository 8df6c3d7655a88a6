"""The block manager: every block is free or referenced, and cached content is found again exactly."""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest

from appliance.engine.block_manager import (
    MAX_TOKENS,
    RELEASED,
    BlockManager,
    held_blocks,
    longest_request,
    most_blocks,
)
from appliance.engine.request import Request
from appliance.sampling_params import SamplingParams

BLOCK = 16


def make_manager(num_blocks: int = 8, *, caching: bool = True, content: bytes = b"model") -> BlockManager:
    return BlockManager(num_blocks, BLOCK, enable_prefix_caching=caching, content_digest=content)


def make_request(tokens: list[int], name: str = "a") -> Request:
    return Request(name, tokens, SamplingParams(), seed=0)


def compute(manager: BlockManager, request: Request) -> int:
    """Admit a request and compute all its tokens, as the scheduler would; returns the length of the prefix hit."""
    prefix = manager.match_prefix(request)
    manager.allocate(request, prefix)
    request.num_computed_tokens = len(prefix[0]) * BLOCK
    assert manager.grow(request, request.num_uncomputed_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.register_full_blocks(request)
    return len(prefix[0]) * BLOCK


def compute_and_free(manager: BlockManager, tokens: list[int]) -> int:
    request = make_request(tokens)
    hit = compute(manager, request)
    manager.free(request)
    manager.check_integrity([])
    return hit


def test_grow_takes_blocks_per_chunk_and_the_same_chunk_once() -> None:
    manager, request = make_manager(), make_request(list(range(40)))
    manager.allocate(request, [[]])
    assert manager.grow(request, 16)
    assert manager.grow(request, 16)
    assert len(request.block_tables[0]) == 1
    request.num_computed_tokens = 16
    assert manager.grow(request, 1)
    assert len(request.block_tables[0]) == 2
    assert manager.num_free_blocks == 6


def test_grow_that_does_not_fit_takes_nothing() -> None:
    manager, request = make_manager(2), make_request(list(range(40)))
    manager.allocate(request, [[]])
    assert not manager.grow(request, 40)
    assert request.block_tables == [[]]
    assert manager.num_free_blocks == 2


def test_blocks_are_reused_least_recently_freed_first_and_tails_before_heads() -> None:
    manager = make_manager(4)
    older, newer = list(range(32)), list(range(100, 132))
    requests = [make_request(older, "older"), make_request(newer, "newer")]
    for request in requests:
        compute(manager, request)
    for request in requests:
        manager.free(request)
    taker, hits = make_request([7] * 64, "taker"), []
    manager.allocate(taker, [[]])
    for num_taken in (16, 32, 48, 64):
        assert manager.grow(taker, num_taken)
        hits.append([len(manager.match_prefix(make_request([*tokens, 0]))[0]) for tokens in (older, newer)])
    assert hits == [[1, 2], [0, 2], [0, 1], [0, 0]]


def test_a_hit_takes_the_block_out_of_the_free_list_and_shares_it() -> None:
    manager = make_manager(4)
    compute_and_free(manager, list(range(20)))
    first, second = make_request(list(range(20)), "first"), make_request(list(range(20)), "second")
    assert manager.num_unreferenced(manager.match_prefix(first)) == 1
    compute(manager, first)
    assert manager.num_unreferenced(manager.match_prefix(second)) == 0
    manager.allocate(second, manager.match_prefix(second))
    assert second.block_tables[0] == first.block_tables[0][:1]
    manager.check_integrity([first, second])
    manager.free(first)
    manager.check_integrity([second])
    assert manager.num_free_blocks == 3


def test_a_taken_block_is_no_longer_found_by_its_old_content() -> None:
    manager = make_manager(2)
    compute_and_free(manager, list(range(32)))
    compute_and_free(manager, list(range(50, 82)))
    assert manager.match_prefix(make_request([*range(32), 0])) == [[]]


def test_output_tokens_are_cached_like_prompt_tokens() -> None:
    manager, request = make_manager(), make_request(list(range(10)))
    request.output_token_ids.extend(range(10, 40))
    compute(manager, request)
    manager.free(request)
    assert compute_and_free(manager, list(range(40))) == 32


def test_the_hit_ends_where_tokens_differ() -> None:
    manager = make_manager(16)
    compute_and_free(manager, list(range(64)))
    assert compute_and_free(manager, [*range(40), 99, *range(41, 64)]) == 32
    assert compute_and_free(manager, [99, *range(1, 64)]) == 0


def test_content_registered_twice_keeps_its_first_block() -> None:
    manager = make_manager()
    first, second = make_request(list(range(16)), "first"), make_request(list(range(16)), "second")
    compute(manager, first)
    compute(manager, second)
    manager.check_integrity([first, second])
    assert first.block_tables != second.block_tables
    assert manager.match_prefix(make_request(list(range(17)))) == first.block_tables


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(caching=False)
    assert compute_and_free(manager, list(range(40))) == 0
    assert compute_and_free(manager, list(range(40))) == 0


def test_writing_a_shared_block_is_refused() -> None:
    manager, request = make_manager(), make_request(list(range(33)))
    compute_and_free(manager, list(range(33)))
    manager.allocate(request, manager.match_prefix(request))
    request.num_computed_tokens = 31
    with pytest.raises(AssertionError, match="would write block 1, but 2 are shared"):
        manager.grow(request, 1)


def test_integrity_check_finds_a_leaked_block() -> None:
    manager, request = make_manager(), make_request([1])
    compute(manager, request)
    with pytest.raises(AssertionError, match="count 1, tables 0"):
        manager.check_integrity([])


def test_bug_14_block_keys_are_cryptographic_digests_over_content_parent_and_tokens() -> None:
    """A key guessable from `hash()` lets a crafted prompt hit another user's block."""
    request = make_request(list(range(32)))
    compute(make_manager(content=b"weights"), request)
    first = sha256(sha256(b"weights").digest() + struct.pack("<16q", *range(16))).digest()
    second = sha256(first + struct.pack("<16q", *range(16, 32))).digest()
    assert request.block_digests == [first, second]


def test_bug_14_other_content_gives_other_keys() -> None:
    requests = [make_request(list(range(16))) for _ in range(2)]
    for request, content in zip(requests, (b"adapter 1", b"adapter 2"), strict=True):
        compute(make_manager(content=content), request)
    assert requests[0].block_digests != requests[1].block_digests


def test_bug_16_a_fully_cached_prompt_of_whole_blocks_recomputes_its_last_block_only() -> None:
    """Computing nothing left nothing to sample from; recomputing one token left the last block out of the chain."""
    manager = make_manager()
    prompt = list(range(32))
    assert compute_and_free(manager, prompt) == 0
    assert compute_and_free(manager, prompt) == 16
    assert compute_and_free(manager, [*prompt, 32]) == 32


def windowed(num_blocks: int, *windows: int | None) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, enable_prefix_caching=True, content_digest=b"model", windows=windows)


def test_a_window_releases_what_no_coming_token_sees() -> None:
    """Of a window of 20, a token at position 100 sees 81 to 100: blocks 5 and 6."""
    manager, request = windowed(30, None, 20), make_request(list(range(101)))
    manager.allocate(request, [[], []])
    for _ in range(10):
        assert manager.grow(request, 10)
        request.num_computed_tokens += 10
        manager.register_full_blocks(request)
        manager.check_integrity([request])
    assert manager.grow(request, 1)
    full, sliding = request.block_tables
    assert [block == RELEASED for block in sliding] == [True] * 5 + [False] * 2
    assert len(set(held_blocks([full, sliding]))) == 9
    assert manager.num_free_blocks == 21
    manager.free(request)
    assert manager.num_free_blocks == 30


def test_a_hit_needs_of_a_window_only_what_the_next_token_sees() -> None:
    tokens = list(range(100))
    manager = windowed(40, None, 20)
    compute_and_free(manager, tokens)
    tables = manager.match_prefix(make_request([*tokens, 0]))
    assert [len(table) for table in tables] == [6, 6]
    assert [block == RELEASED for block in tables[1]] == [True] * 4 + [False] * 2
    longer = make_request([*tokens, 0])
    assert compute(manager, longer) == 96
    manager.check_integrity([longer])


def test_a_hit_ends_where_a_window_lost_a_block() -> None:
    """The fourth block of the window is gone: prefixes of four blocks to five need it, one of three does not."""
    tokens = list(range(100))
    manager = windowed(40, None, 20)
    compute_and_free(manager, tokens)
    probe = make_request([*tokens, 0])
    lost = manager._block_of.pop(manager._key(probe, 1, 3))
    manager._key_of[lost] = None
    assert [len(table) for table in manager.match_prefix(make_request(tokens[:81]))] == [3, 3]
    assert [len(table) for table in manager.match_prefix(probe)] == [6, 6]


def test_groups_never_share_a_block() -> None:
    """One key a group: the same tokens have other keys and values in other layers."""
    manager = windowed(20, None, None, 1000)
    request = make_request(list(range(40)))
    compute(manager, request)
    assert len(set(held_blocks(request.block_tables))) == 9
    tables = manager.match_prefix(make_request([*range(40), 1]))
    assert tables == [table[:2] for table in request.block_tables]


@pytest.mark.parametrize("windows", [(None,), (None, 20), (20,), (1, 40, None)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_no_request_holds_more_than_the_most(windows: tuple[int | None, ...], chunk: int) -> None:
    manager, request = windowed(200, *windows), make_request(list(range(300)))
    manager.allocate(request, [[] for _ in windows])
    most = 0
    while request.num_uncomputed_tokens:
        count = min(chunk, request.num_uncomputed_tokens)
        assert manager.grow(request, count)
        request.num_computed_tokens += count
        most = max(most, sum(1 for _ in held_blocks(request.block_tables)))
    bound = most_blocks(windows, BLOCK, 300, chunk)
    assert bound - 2 * len(windows) <= most <= bound
    longest = longest_request(windows, BLOCK, bound, chunk)
    assert longest >= 300
    assert longest == MAX_TOKENS or most_blocks(windows, BLOCK, longest + 1, chunk) > bound
