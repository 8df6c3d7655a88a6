"""The bounds that paging is for: little of what is given out lies unused, and many more requests fit."""

from __future__ import annotations

import pytest

from benchmarks.kv_waste import LONGEST, measure, mixed_requests


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_less_than_a_twenty_fifth_of_allocated_slots_is_unused(seed: int) -> None:
    use = measure(seed=seed)
    assert use.mean_length >= 400
    assert use.waste < 0.04


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_twice_the_requests_of_contiguous_reservations_run_at_once(seed: int) -> None:
    use = measure(seed=seed)
    assert use.contiguous_requests == 16
    assert use.gain >= 2


def test_a_block_of_the_longest_length_is_a_contiguous_reservation() -> None:
    """The measure itself: without paging it finds neither advantage."""
    use = measure(block_size=LONGEST)
    assert use.waste > 0.5
    assert use.gain <= 1


def test_the_load_is_mixed() -> None:
    requests = mixed_requests(0, 200)
    totals = [request.num_prompt_tokens + (request.params.max_tokens or 0) for request in requests]
    assert min(totals) < 150
    assert max(totals) > 1800
    assert all(100 <= total <= 2000 for total in totals)
