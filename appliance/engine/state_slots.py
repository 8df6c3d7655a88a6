"""Which slot of recurrent state belongs to which request, and which ones keep snapshots.

Knows slots as numbers; nothing of tensors. A slot holds what all recurrent layers remember after some whole number of
tokens. Copies between slots are queued and handed out in order, to run before the next step computes: a slot may
therefore be given away in the moment it is let go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class StateSlots:
    """Owns `num_slots` slots; each is free, a request's, or a snapshot's. Requests may take the place of snapshots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        # By digest of the tokens that the state has seen, least recently used first.
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def has_snapshot(self, digest: bytes) -> bool:
        return digest in self._snapshots

    def take(self, digest: bytes | None) -> int:
        """A slot for a request that starts from the snapshot `digest`, or from nothing: then it holds no state yet.

        There must be one that no request holds.
        """
        if digest is not None:
            self._snapshots.move_to_end(digest)
        source = None if digest is None else self._snapshots[digest]
        slot = self._take()
        if source is not None and slot != source:  # else the snapshot itself was the last to evict
            self._copies.append((source, slot))
        return slot

    def release(self, slot: int) -> None:
        """Give back a request's slot."""
        self._free.append(slot)

    def save(self, digest: bytes, slot: int, *, may_evict: bool) -> None:
        """Keep the state in `slot` as a snapshot, if there is room. may_evict: in the place of another, if need be."""
        if digest in self._snapshots:
            self._snapshots.move_to_end(digest)
        elif self._free or (may_evict and self._snapshots):
            target = self._take()
            self._snapshots[digest] = target
            self._copies.append((slot, target))

    def drain_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of every copy queued since the last call, in the order in which they are to run."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that every slot is free, a snapshot's or one of `held`, and only one of these."""
        slots = sorted([*self._free, *self._snapshots.values(), *held])
        assert slots == list(range(self.num_slots)), f"of {self.num_slots} state slots {slots} are accounted for"

    def _take(self) -> int:
        return self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
