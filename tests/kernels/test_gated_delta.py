"""The gated delta rule by chunks and by steps equals its reference, token by token, whatever runs beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from appliance.kernels import gated_delta
from appliance.kernels.gated_delta import StateRows
from appliance.kernels.reference.gated_delta import gated_delta_rule as reference

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 24


def make_rows(num_rows: int, seed: int, decay: float = 1.0) -> list[Tensor]:
    """q, k, v, decay and beta. decay: how fast; 1000 forgets everything at once."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(num_rows, KEY_HEADS, KEY_DIM, generator=generator) for _ in range(2))
    v = torch.randn(num_rows, VALUE_HEADS, VALUE_DIM, generator=generator)
    left = -decay * torch.rand(num_rows, VALUE_HEADS, generator=generator)
    return [q, k, v, left, torch.rand(num_rows, VALUE_HEADS, generator=generator)]


def expect(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and the state after them, from nothing."""
    q, k, v, decay, beta = inputs
    return reference(q, k, v, decay, beta, torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM))


def make_states(num_slots: int) -> Tensor:
    return torch.full((num_slots, VALUE_HEADS, KEY_DIM, VALUE_DIM), torch.nan)


def run(inputs: list[Tensor], states: Tensor, slots: list[int], lengths: list[int], starts_anew: bool) -> Tensor:
    """A step of requests of `lengths` rows; leading ones of one row that carry a state on are decodes."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    num_decode = 0 if starts_anew else next((i for i, n in enumerate(lengths) if n > 1), len(lengths))
    rows = StateRows(torch.tensor(slots), offsets, [not starts_anew] * len(slots), num_decode)
    q, k, v, decay, beta = inputs
    return gated_delta.gated_delta_rule(q, k, v, decay, beta, states, rows)


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.01, 1.0, 1000.0])
def test_chunks_equal_tokens(num_rows: int, decay: float) -> None:
    """From nothing, in a slot full of NaN; then decodes on top."""
    inputs = make_rows(num_rows + 3, num_rows, decay)
    expected, after = expect(inputs)
    states = make_states(3)
    outputs = [run([x[:num_rows] for x in inputs], states, [1], [num_rows], starts_anew=True)]
    for i in range(num_rows, num_rows + 3):
        outputs.append(run([x[i : i + 1] for x in inputs], states, [1], [1], starts_anew=False))
    torch.testing.assert_close(torch.cat(outputs), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[1], after, atol=2e-5, rtol=1e-4)
    assert states[[0, 2]].isnan().all(), "other slots are left alone"


def test_a_later_chunk_carries_the_state_on() -> None:
    inputs = make_rows(150, 3)
    expected, after = expect(inputs)
    states = make_states(1)
    first = run([x[:70] for x in inputs], states, [0], [70], starts_anew=True)
    second = run([x[70:] for x in inputs], states, [0], [80], starts_anew=False)
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0], after, atol=2e-5, rtol=1e-4)


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit: decodes and prefill chunks, alone and together, in slots out of order."""
    lengths, slots = [1, 1, 1, 5, 70], [4, 0, 2, 3, 1]
    inputs, bounds = make_rows(sum(lengths), 9), [1, 2, 3, 8]
    states = torch.randn(make_states(5).shape, generator=torch.Generator().manual_seed(2))
    together = states.clone()
    outputs = run(inputs, together, slots, lengths, starts_anew=False).tensor_split(bounds)
    for i, part in enumerate(zip(*(x.tensor_split(bounds) for x in inputs), strict=True)):
        alone = states.clone()
        assert torch.equal(run(list(part), alone, [slots[i]], [lengths[i]], starts_anew=False), outputs[i])
        assert torch.equal(alone[slots[i]], together[slots[i]])
