"""Which KV block belongs to whom: reference counts, the free list and the prefix cache.

Knows blocks as numbers and tokens as integers; nothing of tensors or of scheduling policy. Every operation costs O(1)
per block.

    free list     blocks with no reference, least recently freed first; a block in it may still hold cached content and
                  is found by its key until it is taken for something else
    block digest  sha256(parent digest || block_size token ids as little-endian int64); the parent of block 0 is
                  sha256(content_digest), where content_digest stands for everything but tokens that changes KV
    key           block digest || group

Layers come in groups of equal size, and a request has a block table for each: block i of a table holds positions
i * block_size and on, of that group's layers. All groups draw on one pool, because a block is as large in each. A group
whose layers look back over a window keeps no block that every coming token is past: RELEASED stands in its place.

Recurrent layers have no blocks: a request holds one state slot (state_slots), and a cached prefix is of use only as far
as a snapshot of the state at its end was kept.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from appliance.engine.request import Request
from appliance.engine.state_slots import StateSlots

RELEASED = -1
"""Stands in a block table for a block that its group's window has left behind."""
MAX_TOKENS = 1 << 40
"""More than any request has."""


def most_blocks(windows: Sequence[int | None], block_size: int, num_tokens: int, chunk: int) -> int:
    """The most blocks that a request holds at once until it has `num_tokens` tokens, computed `chunk` at a time."""
    whole = -(-num_tokens // block_size)
    # Of a window: what a chunk's first token sees, and the chunk, lying across blocks at their worst.
    return sum(
        whole if window is None else min(whole, -(-(window - 1 + chunk) // block_size) + 1) for window in windows
    )


def longest_request(windows: Sequence[int | None], block_size: int, num_blocks: int, chunk: int) -> int:
    """The most tokens whose blocks fit a pool of `num_blocks`; MAX_TOKENS where windows alone decide."""
    if most_blocks(windows, block_size, MAX_TOKENS, chunk) <= num_blocks:
        return MAX_TOKENS
    sizes = range(num_blocks + 1)
    return block_size * (
        bisect_right(sizes, num_blocks, key=lambda size: most_blocks(windows, block_size, size * block_size, chunk)) - 1
    )


class BlockManager:
    """Owns `num_blocks` KV blocks of `block_size` tokens; each block is free or referenced, never both.

    A block is registered in the prefix cache once full and never written again, so a shared block is never written.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        content_digest: bytes,
        windows: Sequence[int | None] = (None,),
        num_state_slots: int = 0,
    ) -> None:
        """windows: of each group of layers; None for one whose tokens attend to all before them. num_state_slots: 0
        where no layer is recurrent.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = tuple(windows)
        self.states = StateSlots(num_state_slots) if num_state_slots else None
        self._root_digest = sha256(content_digest).digest()
        self._pack_block = struct.Struct(f"<{block_size}q").pack
        self._ref_counts = [0] * num_blocks
        # An OrderedDict, because taking the first key of a plain dict walks over the keys deleted before it.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced blocks, cached ones included."""
        return len(self._free)

    def num_unreferenced(self, prefix: Sequence[Sequence[int]]) -> int:
        """How many blocks of the tables `prefix` would leave the free list if they were allocated."""
        return sum(self._ref_counts[block] == 0 for block in held_blocks(prefix))

    def match_prefix(self, request: Request) -> list[list[int]]:
        """A table a group of cached blocks that hold the request's first tokens, in order; takes none of them.

        Cut to whole blocks strictly before the request's last token, which must be computed to sample from. Of a group
        with a window only the blocks are needed that the next token sees; recurrent layers need a snapshot at the end.
        """
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return [[] for _ in self.windows]
        count = (request.num_tokens - 1) // self.block_size
        for group, window in enumerate(self.windows):
            if window is None:
                found = 0
                while found < count and self._cached(request, group, found) is not None:
                    found += 1
                count = found
        # A missing block that a window needs leaves only prefixes that end before it, for every group.
        has_changed = True
        while has_changed:
            has_changed = False
            while self.states and count and not self.states.has_snapshot(self._digest(request, count - 1)):
                count -= 1
            for group, window in enumerate(self.windows):
                for index in range(count - 1, self._first_seen(window, count * self.block_size) - 1, -1):
                    if window is not None and self._cached(request, group, index) is None:
                        count, has_changed = index, True
        tables: list[list[int]] = []
        for group, window in enumerate(self.windows):
            first = self._first_seen(window, count * self.block_size)
            blocks = [self._cached(request, group, index) for index in range(first, count)]
            tables.append([RELEASED] * first + [block for block in blocks if block is not None])
        return tables

    def allocate(self, request: Request, prefix: Sequence[Sequence[int]]) -> None:
        """Start the request's block tables with those that `match_prefix` found for it just now."""
        assert not any(request.block_tables), f"{request.request_id} holds blocks already"
        for block in held_blocks(prefix):
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        request.block_tables = [list(table) for table in prefix]
        request.num_registered_blocks = count = len(prefix[0])
        if self.states:
            request.state_slot = self.states.take(self._digest(request, count - 1) if count else None)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Take the blocks that the request's next `num_tokens` tokens need; False, and none taken, if too few are free.

        Calling it again for the same tokens takes nothing more. What these tokens see no more is released.
        """
        first_written = request.num_computed_tokens // self.block_size
        assert first_written >= request.num_registered_blocks, (
            f"{request.request_id} would write block {first_written}, but {request.num_registered_blocks} are shared"
        )
        self._release(request)
        tables = request.block_tables
        missing = -(-(request.num_computed_tokens + num_tokens) // self.block_size) - len(tables[0])
        if missing * len(tables) > len(self._free):
            return False
        for _ in range(missing):
            for table in tables:
                table.append(self._take())
        return True

    def register_full_blocks(self, request: Request) -> None:
        """Make the blocks that computed tokens have filled findable; content already registered keeps its block."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        for index in range(request.num_registered_blocks, num_full):
            for group, table in enumerate(request.block_tables):
                block, key = table[index], self._key(request, group, index)
                if block != RELEASED and key not in self._block_of:
                    self._block_of[key] = block
                    self._key_of[block] = key
        request.num_registered_blocks = max(request.num_registered_blocks, num_full)

    def save_state(self, request: Request, *, may_evict: bool) -> None:
        """Keep a snapshot of the recurrent state that the computed tokens, whole blocks, have left. may_evict: an older
        one may go for it.
        """
        assert self.states is not None
        assert request.state_slot is not None
        assert request.num_computed_tokens % self.block_size == 0
        index = request.num_computed_tokens // self.block_size - 1
        self.states.save(self._digest(request, index), request.state_slot, may_evict=may_evict)

    def free(self, request: Request) -> None:
        """Drop all of the request's references. Tails go first, so a chain is evicted from its end."""
        for blocks in zip(*(reversed(table) for table in request.block_tables), strict=True):
            for block in blocks:
                self._drop(block)
        request.block_tables = []
        if self.states and request.state_slot is not None:
            self.states.release(request.state_slot)
            request.state_slot = None

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert free + referenced == total, that reference counts are those of the requests' block tables, and that
        every state slot is accounted for.
        """
        requests = list(requests)
        references = Counter(block for request in requests for block in held_blocks(request.block_tables))
        for block, count in enumerate(self._ref_counts):
            assert count == references[block], f"block {block}: count {count}, tables {references[block]}"
            assert (count == 0) == (block in self._free), f"block {block}: count {count}, free {block in self._free}"
        assert len(self._free) + len(references) == self.num_blocks, (
            f"{len(self._free)} free + {len(references)} referenced != {self.num_blocks}"
        )
        if self.states:
            self.states.check_integrity(r.state_slot for r in requests if r.state_slot is not None)
        registered = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert registered == self._block_of, "the prefix cache and the blocks name different digests"
        for request in requests:
            for window, table in zip(self.windows, request.block_tables, strict=True):
                room = len(table) * self.block_size
                assert request.num_computed_tokens <= room, (
                    f"{request.request_id}: {request.num_computed_tokens} computed tokens in room for {room}"
                )
                seen = table[self._first_seen(window, request.num_computed_tokens) :]
                assert RELEASED not in seen, f"{request.request_id}: a block is released that its next token sees"

    def _first_seen(self, window: int | None, position: int) -> int:
        """The first block that a token at `position` sees."""
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def _release(self, request: Request) -> None:
        for window, table in zip(self.windows, request.block_tables, strict=True):
            index = min(self._first_seen(window, request.num_computed_tokens), len(table)) - 1
            while index >= 0 and table[index] != RELEASED:
                self._drop(table[index])
                table[index] = RELEASED
                index -= 1

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
        self._ref_counts[block] = 1
        return block

    def _drop(self, block: int) -> None:
        if block != RELEASED:
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None

    def _cached(self, request: Request, group: int, index: int) -> int | None:
        return self._block_of.get(self._key(request, group, index))

    def _key(self, request: Request, group: int, index: int) -> bytes:
        return self._digest(request, index) + group.to_bytes(2, "little")

    def _digest(self, request: Request, index: int) -> bytes:
        digests = request.block_digests
        while len(digests) <= index:
            start = len(digests) * self.block_size
            parent = digests[-1] if digests else self._root_digest
            tokens = self._pack_block(*request.token_ids(start, start + self.block_size))
            digests.append(sha256(parent + tokens).digest())
        return digests[index]


def held_blocks(tables: Iterable[Sequence[int]]) -> Iterable[int]:
    """The blocks of block tables that are not released."""
    return (block for table in tables for block in table if block != RELEASED)
