from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.engine.philox import uniforms
from appliance.engine.sampler import NO_TOKEN, Sampler, SamplingRow
from appliance.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_row(params: SamplingParams, **fields: Any) -> SamplingRow:
    defaults: dict[str, Any] = {
        "seed": 0,
        "position": 0,
        "prompt_token_ids": (),
        "output_token_ids": (),
        "eos_token_ids": (),
    }
    return SamplingRow(params=params, **defaults | fields)


def make_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: Tensor, row: SamplingRow) -> int:
    return Sampler(logits.shape[-1])(logits.view(1, -1), [row]).token_ids[0]


def draws(logits: Tensor, params: SamplingParams, count: int, seed: int = 11) -> list[int]:
    rows = [make_row(params, seed=seed, position=position) for position in range(count)]
    return Sampler(len(logits))(logits.expand(count, -1), rows).token_ids


def survivors(probabilities: list[float], params: SamplingParams) -> list[int]:
    """The filters as their documentation words them, by a full sort."""
    ranked = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        sums = list(itertools.accumulate(probabilities[token] for token in ranked))
        total = sums[-1] if params.top_k > 0 else 1.0
        ranked = [token for i, token in enumerate(ranked) if i == 0 or sums[i - 1] < params.top_p * total]
    # The comparison is float32's, as the probabilities are.
    limit = torch.tensor(params.min_p) * torch.tensor(probabilities[ranked[0]])
    return [token for token in ranked if torch.tensor(probabilities[token]) >= limit]


def expected_token(logits: Tensor, params: SamplingParams, number: float) -> int:
    shifted = (logits.float() - logits.float().max()) / params.temperature
    probabilities = shifted.softmax(dim=0).tolist()
    unfiltered = params.top_k <= 0 and params.top_p >= 1.0 and params.min_p == 0.0
    tokens = list(range(len(probabilities))) if unfiltered else survivors(probabilities, params)
    sums = list(itertools.accumulate(probabilities[token] for token in tokens))
    return tokens[bisect_right(sums, number * sums[-1])]


@settings(max_examples=200, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 5, 63, 64, 257, 1500]),
    scale=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    tied=st.booleans(),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([-1, 0, 2, 7, 20, 40, 1000, 1 << 31]),
    top_p=st.sampled_from([1e-4, 0.3, 0.9, 0.99, 0.99999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, (1 << 64) - 1),
)
def test_token_is_what_a_full_sort_and_one_uniform_give(
    vocab_size: int, scale: float, tied: bool, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = make_logits(1, vocab_size, seed=seed % 1000, scale=scale)[0]
    if tied:
        logits = logits.round()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    number = uniforms([seed], [3], [1])[0]
    row = make_row(params, seed=seed, position=3, child_index=1)
    assert sample_one(logits, row) == expected_token(logits, params, number)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    count = 6000
    logits = make_logits(1, 12, seed=2, scale=1.0)[0]
    probabilities = (logits.double() / params.temperature).softmax(dim=0).tolist()
    kept = survivors(probabilities, params)
    mass = sum(probabilities[token] for token in kept)
    observed = torch.bincount(torch.tensor(draws(logits, params, count)), minlength=12).tolist()
    assert sum(observed[token] for token in kept) == count
    statistic = sum(
        (observed[t] - count * probabilities[t] / mass) ** 2 / (count * probabilities[t] / mass) for t in kept
    )
    # Mean plus five standard deviations of chi-square.
    freedom = len(kept) - 1
    assert freedom > 0
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    assert set(draws(torch.zeros(300), SamplingParams(top_k=3), 200)) == {0, 1, 2}


def test_top_p_counts_its_share_of_what_top_k_left() -> None:
    # top_k leaves 0.5 and 0.3, of which the first is 0.625: enough for top_p 0.6, though 0.5 of the whole is not.
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(logits, SamplingParams(top_k=2, top_p=0.6), 200)) == {0}
    assert set(draws(logits, SamplingParams(top_p=0.6), 200)) == {0, 1}


MIXED = [
    make_row(GREEDY),
    make_row(SamplingParams(), seed=1, position=4),
    make_row(SamplingParams(temperature=0.7, top_p=0.9), seed=2, position=9),
    make_row(SamplingParams(temperature=2.0, top_k=40), seed=3),
    make_row(SamplingParams(temperature=0.3, min_p=0.05), seed=4, output_token_ids=[1] * 50),
    make_row(SamplingParams(frequency_penalty=1.05), seed=5, output_token_ids=[7, 7, 8]),
    make_row(
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        prompt_token_ids=[3, 4],
        output_token_ids=list(range(90)),
    ),
    make_row(SamplingParams(min_tokens=3, stop_token_ids=(5,)), seed=6, eos_token_ids=(2, 3)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1003, 4096])
def test_token_does_not_depend_on_neighbours(vocab_size: int, dtype: torch.dtype) -> None:
    sampler = Sampler(vocab_size)
    for step in range(20):
        rows = [dataclasses.replace(row, seed=row.seed + 100 * step) for row in MIXED]
        logits = make_logits(len(rows), vocab_size, seed=step, scale=1.0).to(dtype)
        together = sampler(logits, rows).token_ids
        assert together == [sampler(logits[i : i + 1], [row]).token_ids[0] for i, row in enumerate(rows)]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step)).tolist()
        shuffled = sampler(logits[order], [rows[i] for i in order]).token_ids
        assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("seed", [0, 1 << 63, (1 << 64) - 1, -5, 1 << 80])
def test_seed_of_any_size_repeats_its_draws(seed: int) -> None:
    logits = make_logits(1, 500)[0]
    first = draws(logits, SamplingParams(), 40, seed=seed)
    assert first == draws(logits, SamplingParams(), 40, seed=seed)
    assert first != draws(logits, SamplingParams(), 40, seed=seed + 1)


def test_children_of_one_seed_draw_differently() -> None:
    logits = make_logits(1, 5000, scale=0.1)[0]
    tokens = {sample_one(logits, make_row(SamplingParams(), seed=9, child_index=child)) for child in range(8)}
    assert len(tokens) == 8


@pytest.mark.parametrize(
    "params",
    [
        *(SamplingParams(temperature=temperature) for temperature in (1e-4, 1e-6, 1e-40, 0.0)),
        SamplingParams(top_p=1e-4),
        SamplingParams(top_p=0.0),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-40, top_p=1e-4, top_k=50),
    ],
)
@pytest.mark.parametrize("scale", [3.0, 1e4, 1e36])
def test_settings_with_one_winner_equal_greedy(params: SamplingParams, scale: float) -> None:
    logits = make_logits(16, 300, scale=scale)
    rows = [make_row(params, seed=seed) for seed in range(16)]
    result = Sampler(300)(logits, rows)
    assert result.token_ids == logits.argmax(dim=-1).tolist()
    assert result.faulty == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_lowest_id_when_greedy(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 5000, dtype=dtype)
    logits[:, [700, 701, 4999]] = 1.0
    assert Sampler(5000)(logits, [make_row(GREEDY)] * 3).token_ids == [700, 700, 700]
    edited = make_row(SamplingParams(temperature=0.0, presence_penalty=1.0), output_token_ids=[3])
    assert sample_one(logits[0], edited) == 700


def test_presence_and_frequency_penalties_count_output_tokens_only() -> None:
    logits = torch.tensor([5.0, 4.5, 0.0])
    for params in (
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
    ):
        assert sample_one(logits, make_row(params, prompt_token_ids=[0, 0, 0])) == 0
        assert sample_one(logits, make_row(params, output_token_ids=[0])) == 1


def test_frequency_penalty_grows_with_the_count_and_presence_penalty_does_not() -> None:
    logits = torch.tensor([5.0, 3.5, 0.0])
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    presence = SamplingParams(temperature=0.0, presence_penalty=0.5)
    assert [sample_one(logits, make_row(frequency, output_token_ids=[0] * count)) for count in (2, 4)] == [0, 1]
    assert [sample_one(logits, make_row(presence, output_token_ids=[0] * count)) for count in (2, 4)] == [0, 0]


@pytest.mark.parametrize("field", ["prompt_token_ids", "output_token_ids"])
def test_repetition_penalty_counts_prompt_and_output_and_lowers_either_sign(field: str) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert sample_one(torch.tensor([5.0, 3.0, 0.0]), make_row(params, **{field: [0, 0, 0]})) == 1
    assert sample_one(torch.tensor([5.0, 2.0, 0.0]), make_row(params, **{field: [0, 0, 0]})) == 0
    assert sample_one(torch.tensor([-3.0, -5.0, -9.0]), make_row(params, **{field: [0]})) == 1


def test_eos_and_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([0.0, 9.0, 8.0, 7.0, 1.0])
    for temperature in (0.0, 0.1):
        # An id beyond the vocabulary has nothing to mask.
        params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=(3, 1_000_000))
        tokens = [sample_one(logits, make_row(params, position=i, eos_token_ids=(1, 2))) for i in range(6)]
        assert tokens == [4, 4, 4, 4, 1, 1]


def test_min_tokens_ends_at_its_position_whatever_penalty_is_on() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, presence_penalty=1.0)
    tokens = [sample_one(torch.tensor([0.0, 9.0]), make_row(params, position=i, eos_token_ids=(1,))) for i in range(4)]
    assert tokens == [0, 0, 1, 1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.99)])
def test_padding_of_the_vocabulary_is_never_sampled(params: SamplingParams) -> None:
    logits = torch.zeros(50, 128)
    logits[:, 100:] = 50.0
    logits[0, 100:] = math.nan
    result = Sampler(100)(logits, [make_row(params, seed=seed) for seed in range(50)])
    assert max(result.token_ids) < 100
    assert result.faulty == []


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=5), SamplingParams(min_p=1e-30)])
def test_token_masked_by_minus_infinity_is_never_sampled(params: SamplingParams) -> None:
    logits = torch.full((200,), -math.inf)
    logits[[20, 30]] = 0.0
    assert set(draws(logits, params, 100)) == {20, 30}


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5), MIXED[5].params, MIXED[7].params]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_faulty_row_is_reported_and_its_neighbours_are_as_without_it(params: SamplingParams, value: float) -> None:
    sampler = Sampler(1003)
    logits = make_logits(len(MIXED), 1003)
    rows = [*MIXED]
    rows[4] = dataclasses.replace(rows[4], params=params)
    healthy = sampler(logits, rows)
    assert healthy.faulty == []
    broken = logits.clone()
    broken[4, 1002] = value
    result = sampler(broken, rows)
    assert result.faulty == [4]
    assert result.token_ids == [NO_TOKEN if i == 4 else token for i, token in enumerate(healthy.token_ids)]


@pytest.mark.parametrize(("number", "token"), [(0.0, 20), (1.0 - 2.0**-32, 30)])
def test_extreme_numbers_meet_no_token_of_weight_zero(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.engine.sampler.uniforms", lambda *_: [number])
    logits = torch.full((200,), -math.inf)
    logits[[20, 30]] = 0.0
    assert sample_one(logits, make_row(SamplingParams())) == token


def test_row_with_nothing_left_to_sample_is_faulty() -> None:
    logits = torch.full((3, 4), -math.inf)
    logits[1, 2] = 0.0
    stopped = SamplingParams(min_tokens=1)
    rows = [make_row(GREEDY), make_row(stopped, eos_token_ids=(2,)), make_row(SamplingParams())]
    assert Sampler(4)(logits, rows).faulty == [0, 1, 2]


def test_logits_are_left_unchanged() -> None:
    logits = make_logits(len(MIXED), 1003)
    before = logits.clone()
    Sampler(1003)(logits, MIXED)
    assert torch.equal(logits, before)


def test_empty_batch_samples_nothing() -> None:
    assert Sampler(10)(torch.zeros(0, 10), []).token_ids == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_distribution_and_the_likeliest_is_the_greedy_token(dtype: torch.dtype) -> None:
    logits = make_logits(3, 500, seed=4).to(dtype)
    greedy = SamplingParams(temperature=0.0, logprobs=20, frequency_penalty=0.5)
    rows = [make_row(dataclasses.replace(greedy, frequency_penalty=0.0)), make_row(GREEDY), make_row(greedy)]
    result = Sampler(500)(logits, rows)
    assert set(result.logprobs) == {0, 2}
    expected = logits.double().log_softmax(dim=-1)
    for i, found in result.logprobs.items():
        assert found.token_id == result.token_ids[i]
        assert found.logprob == found.top[0][1], "bit for bit"
        assert found.top[0][0] == found.token_id
        assert [token for token, _ in found.top] == expected[i].topk(20).indices.tolist() or dtype != torch.float32
        for token, value in found.top:
            assert value == pytest.approx(expected[i, token].item(), abs=1e-5)


def test_logprobs_of_sampled_and_banned_tokens_are_raw_and_finite() -> None:
    """Public bug sglang#5984: minus infinity is no JSON."""
    logits = make_logits(1, 64)
    logits[0, 7] = -math.inf
    params = SamplingParams(temperature=0.01, top_p=0.3, logit_bias=((5, 100.0), (9, -100.0)), logprobs=20)
    found = Sampler(64)(logits, [make_row(params)]).logprobs[0]
    assert found.token_id == 5
    assert found.logprob == pytest.approx(logits[0].double().log_softmax(dim=-1)[5].item(), abs=1e-5)
    impossible = torch.full((1, 8), -math.inf)
    impossible[0, 3] = 0.0
    found = Sampler(8)(impossible, [make_row(dataclasses.replace(GREEDY, logprobs=20))]).logprobs[0]
    assert [value for _, value in found.top] == [0.0] + [-9999.0] * 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_largest_bias_forces_and_the_smallest_bans(temperature: float) -> None:
    logits = torch.tensor([500.0, 0.0, -500.0, 1.0])
    for biases, expected in [(((2, 100.0),), 2), (((0, -100.0), (3, 1000.0)), 3), (((0, -1e9), (3, -1e9)), 1)]:
        assert sample_one(logits, make_row(SamplingParams(temperature=temperature, logit_bias=biases))) == expected
    assert sample_one(logits, make_row(SamplingParams(temperature=0.0, logit_bias=((1, 2.0), (0, -100.0))))) == 1


def test_a_bias_or_logprobs_in_one_row_leave_its_neighbours_alone() -> None:
    logits = make_logits(3, 300)
    plain = make_row(SamplingParams(temperature=0.8, top_k=5))
    odd = make_row(SamplingParams(temperature=0.8, logit_bias=((1, 50.0),), logprobs=3))
    alone = Sampler(300)(logits, [plain] * 3).token_ids
    assert Sampler(300)(logits, [plain, odd, plain]).token_ids[::2] == alone[::2]
