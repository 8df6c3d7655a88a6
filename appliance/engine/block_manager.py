"""Which KV block belongs to whom: reference counts, the free list and the prefix cache.

Knows blocks as numbers and tokens as integers; nothing of tensors or of scheduling policy. Every operation costs O(1)
per block.

    free list     blocks with no reference, least recently freed first; a block in it may still hold cached content and
                  is found by its digest until it is taken for something else
    block digest  sha256(parent digest || block_size token ids as little-endian int64); the parent of block 0 is
                  sha256(content_digest), where content_digest stands for everything but tokens that changes KV
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from appliance.engine.request import Request


class BlockManager:
    """Owns `num_blocks` KV blocks of `block_size` tokens; each block is free or referenced, never both.

    A block is registered in the prefix cache once full and never written again, so a shared block is never written.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, content_digest: bytes) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._root_digest = sha256(content_digest).digest()
        self._pack_block = struct.Struct(f"<{block_size}q").pack
        self._ref_counts = [0] * num_blocks
        # An OrderedDict, because taking the first key of a plain dict walks over the keys deleted before it.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced blocks, cached ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would leave the free list if they were allocated."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def match_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the request's first tokens, in order; takes none of them.

        Cut to whole blocks strictly before the request's last token, which must be computed to sample from.
        """
        blocks: list[int] = []
        if self.enable_prefix_caching and request.reads_prefix_cache:
            for index in range((request.num_tokens - 1) // self.block_size):
                block = self._block_of.get(self._digest(request, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def allocate(self, request: Request, prefix: Sequence[int]) -> None:
        """Start the request's block table with the blocks `match_prefix` found for it just now."""
        assert not request.block_table, f"{request.request_id} holds {len(request.block_table)} blocks already"
        for block in prefix:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        request.block_table.extend(prefix)
        request.num_registered_blocks = len(prefix)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Take the blocks that the request's next `num_tokens` tokens need; False, and none taken, if too few are free.

        Calling it again for the same tokens takes nothing more.
        """
        table = request.block_table
        first_written = request.num_computed_tokens // self.block_size
        assert first_written >= request.num_registered_blocks, (
            f"{request.request_id} would write block {first_written}, but {request.num_registered_blocks} are shared"
        )
        missing = self.blocks_for(request.num_computed_tokens + num_tokens) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            digest = self._digest_of[block]
            if digest is not None:
                del self._block_of[digest]
                self._digest_of[block] = None
            self._ref_counts[block] = 1
            table.append(block)
        return True

    def register_full_blocks(self, request: Request) -> None:
        """Make the blocks that computed tokens have filled findable; content already registered keeps its block."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        for index in range(request.num_registered_blocks, num_full):
            digest = self._digest(request, index)
            if digest not in self._block_of:
                block = request.block_table[index]
                self._block_of[digest] = block
                self._digest_of[block] = digest
        request.num_registered_blocks = max(request.num_registered_blocks, num_full)

    def free(self, request: Request) -> None:
        """Drop all of the request's references. Tails go first, so a chain is evicted from its end."""
        for block in reversed(request.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
        request.block_table.clear()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert free + referenced == total, and that reference counts are those of the requests' block tables."""
        requests = list(requests)
        references = Counter(block for request in requests for block in request.block_table)
        for block, count in enumerate(self._ref_counts):
            assert count == references[block], f"block {block}: count {count}, tables {references[block]}"
            assert (count == 0) == (block in self._free), f"block {block}: count {count}, free {block in self._free}"
        assert len(self._free) + len(references) == self.num_blocks, (
            f"{len(self._free)} free + {len(references)} referenced != {self.num_blocks}"
        )
        registered = {digest: block for block, digest in enumerate(self._digest_of) if digest is not None}
        assert registered == self._block_of, "the prefix cache and the blocks name different digests"
        for request in requests:
            room = len(request.block_table) * self.block_size
            assert request.num_computed_tokens <= room, (
                f"{request.request_id}: {request.num_computed_tokens} computed tokens in room for {room}"
            )

    def _digest(self, request: Request, index: int) -> bytes:
        digests = request.block_digests
        while len(digests) <= index:
            start = len(digests) * self.block_size
            parent = digests[-1] if digests else self._root_digest
            tokens = self._pack_block(*request.token_ids(start, start + self.block_size))
            digests.append(sha256(parent + tokens).digest())
        return digests[index]
