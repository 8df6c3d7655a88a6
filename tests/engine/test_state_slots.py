"""Slots of recurrent state: each is free, a request's or a snapshot's, and copies keep what they are to keep."""

from __future__ import annotations

from appliance.engine.state_slots import StateSlots


def apply(slots: StateSlots, states: dict[int, str]) -> None:
    """Run the queued copies over what the slots hold."""
    for source, destination in slots.drain_copies():
        states[destination] = states[source]


def test_a_request_from_nothing_costs_no_copy() -> None:
    slots = StateSlots(2)
    assert {slots.take(None), slots.take(None)} == {0, 1}
    assert slots.drain_copies() == ()


def test_a_snapshot_outlives_the_slot_it_was_made_of() -> None:
    """Slots given back and taken again before the copies run: the order of copies keeps every state whole."""
    slots = StateSlots(3)
    first = slots.take(None)
    states = {first: "ab"}
    slots.save(b"ab", first, may_evict=True)
    slots.release(first)
    second = slots.take(b"ab")  # may be the slot just given back
    third = slots.take(None)
    apply(slots, states)
    states[third] = "new"
    assert states[second] == "ab"
    slots.release(third)
    fourth = slots.take(b"ab")
    apply(slots, states)
    assert states[fourth] == "ab"
    slots.check_integrity([second, fourth])


def test_requests_evict_the_least_recently_used_snapshot() -> None:
    """Read in the same step as another takes its slot, an evicted snapshot has been copied before it is overwritten."""
    slots = StateSlots(4)
    writer = slots.take(None)
    states = {}
    for text in ("a", "b", "c"):
        states[writer] = text
        slots.save(text.encode(), writer, may_evict=True)
        apply(slots, states)
    reader = slots.take(b"a")
    assert not slots.has_snapshot(b"b")
    other = slots.take(b"a")
    assert not slots.has_snapshot(b"c")
    last = slots.take(b"a")
    assert slots.num_snapshots == 0
    apply(slots, states)
    assert [states[slot] for slot in (reader, other, last)] == ["a"] * 3
    slots.check_integrity([writer, reader, other, last])


def test_a_chain_of_evictions_in_one_step_copies_in_order() -> None:
    slots = StateSlots(3)
    writer = slots.take(None)
    states = {writer: "a"}
    slots.save(b"a", writer, may_evict=True)
    apply(slots, states)
    states[writer] = "b"
    slots.save(b"b", writer, may_evict=True)
    slots.release(writer)
    reader = slots.take(b"a")
    slots.save(b"a2", reader, may_evict=True)  # in the place of b or a
    apply(slots, states)
    assert states[reader] == "a"
    assert slots.has_snapshot(b"a2")
    again = slots.take(b"a2")
    apply(slots, states)
    assert states[again] == "a"


def test_a_snapshot_in_passing_evicts_nothing() -> None:
    slots = StateSlots(2)
    writer = slots.take(None)
    slots.save(b"end", writer, may_evict=True)
    slots.save(b"passing", writer, may_evict=False)
    assert slots.has_snapshot(b"end")
    assert not slots.has_snapshot(b"passing")
    slots.save(b"other end", writer, may_evict=True)
    assert not slots.has_snapshot(b"end")


def test_without_a_slot_for_it_no_snapshot_is_kept() -> None:
    slots = StateSlots(1)
    writer = slots.take(None)
    slots.save(b"a", writer, may_evict=True)
    assert slots.num_snapshots == 0
    assert slots.drain_copies() == ()
