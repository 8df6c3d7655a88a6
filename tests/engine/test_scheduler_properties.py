"""Whatever arrives, is aborted or preempted, every answer equals that of an undisturbed run and no block is lost.

The model is an integer recurrence that lives in a paged cache and in state slots, read and written through the block
tables and slot numbers only: a wrong, stale or overwritten block or slot changes the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from appliance.client import FinishReason, Priority
from appliance.engine.block_manager import RELEASED, held_blocks, most_blocks
from appliance.engine.request import Request
from appliance.engine.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput
from appliance.errors import CapacityError, QueueFullError
from appliance.sampling_params import SamplingParams

VOCABULARY = 6
EOS = 0
UNWRITTEN = -1
SALT = 3
"""So that a recurrent group's state does not cancel out that of a paged one."""


@dataclass
class PagedModel:
    """The state at a position is a hash of the state before it and the token there; the next token follows from it.

    With state slots a recurrent group holds the same state there too, and nowhere else: it cannot be read back.
    """

    config: SchedulerConfig
    cache: list[int] = field(init=False)
    states: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.cache = [UNWRITTEN] * (self.config.num_blocks * self.config.block_size)
        self.states = [UNWRITTEN] * self.config.num_state_slots

    def execute(self, output: SchedulerOutput, num_sampled: int = 1) -> dict[str, list[int]]:
        """Run a step; a request whose chunk samples gets `num_sampled` tokens, those past the first without KV."""
        for source, destination in output.state_copies:
            self.states[destination] = self.states[source]
        sampled = {}
        for chunk in output.scheduled:
            state = self._compute(chunk)
            if chunk.samples:
                sampled[chunk.request.request_id] = self._continue(chunk.request, state, num_sampled)
        return sampled

    def _slot(self, table: list[int], position: int) -> int:
        block = table[position // self.config.block_size]
        assert block != RELEASED
        return block * self.config.block_size + position % self.config.block_size

    def _compute(self, chunk: ScheduledRequest) -> int:
        """The state after the chunk: of all groups', each made of what its slots hold."""
        request, start = chunk.request, chunk.request.num_computed_tokens
        tokens = request.token_ids(start, start + chunk.num_tokens)
        total = 0
        for window, table in zip(self.config.windows, request.block_tables, strict=True):
            for position, token in enumerate(tokens, start):
                # A full group's slot holds the state up to it, a window's the token alone.
                state = 0
                first = max(position - window + 1, 0) if window else max(position - 1, 0)
                for seen in range(first, position):
                    found = self.cache[self._slot(table, seen)]
                    assert found != UNWRITTEN
                    state = _advance(state, found) if window else found
                state = _advance(state, token)
                self.cache[self._slot(table, position)] = token if window else state
            total ^= state
        if self.states:
            total ^= SALT * self._carry_on(request, start, tokens)
        return total

    def _carry_on(self, request: Request, start: int, tokens: list[int]) -> int:
        """Fold the chunk into the state in the request's slot, which a first chunk finds as someone else left it."""
        assert request.state_slot is not None
        state = self.states[request.state_slot] if start else 0
        assert state != UNWRITTEN
        for token in tokens:
            state = _advance(state, token)
        self.states[request.state_slot] = state
        return state

    def _continue(self, request: Request, state: int, num_tokens: int) -> list[int]:
        tokens = request.token_ids(0, request.num_tokens)
        for _ in range(num_tokens):
            tokens = [*tokens, (state >> 20) % VOCABULARY]
            state = 0
            for window in self.config.windows:
                state ^= _fold(tokens[-window:] if window else tokens)
            if self.states:
                state ^= SALT * _fold(tokens)
        return tokens[request.num_tokens :]


def _advance(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1013904223) % (1 << 61)


def _fold(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = _advance(state, token)
    return state


def make_config(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    enable_prefix_caching: bool = True,
    initial_answer_tokens: int = 1,
    windows: tuple[int | None, ...] = (None,),
    num_state_slots: int = 0,
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=256,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=64,
        enable_prefix_caching=enable_prefix_caching,
        content_digest=b"model",
        eos_token_ids=frozenset({EOS}),
        initial_answer_tokens=initial_answer_tokens,
        windows=windows,
        num_state_slots=num_state_slots,
    )


def undisturbed_answer(
    request: Request, windows: tuple[int | None, ...] = (None,), num_state_slots: int = 0
) -> tuple[list[int], FinishReason | None]:
    """The answer of the request alone, in a pool that is never short, without a prefix cache."""
    config = make_config(
        num_blocks=64,
        block_size=16,
        enable_prefix_caching=False,
        windows=windows,
        num_state_slots=num_state_slots,
    )
    scheduler, model = Scheduler(config), PagedModel(config)
    alone = Request("alone", request.prompt_token_ids, request.params, seed=0)
    scheduler.add(alone)
    alone.max_tokens = request.max_tokens
    reason = None
    while scheduler.has_requests:
        output = scheduler.schedule()
        for result in scheduler.commit(output, model.execute(output)):
            reason = result.finish_reason
    return alone.output_token_ids, reason


# Two letters: prompts share prefixes often.
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=16)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([20, 12, 4, 1, None]),
    min_tokens=st.sampled_from([0, 0, 1]),
    ignore_eos=st.sampled_from([True, True, False]),
    stop_token_ids=st.sampled_from([(), (), (1,)]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts at any moment and steps, in any order, in a pool small enough to preempt often."""

    @initialize(
        num_blocks=st.integers(5, 16),
        block_size=st.sampled_from([4, 2, 1]),
        max_num_seqs=st.sampled_from([4, 3, 6, 2]),
        max_num_batched_tokens=st.sampled_from([8, 16, 5, 3, 1]),
        enable_prefix_caching=st.booleans(),
        expects_short_answers=st.sampled_from([True, True, False]),
        windows=st.sampled_from([(None,), (None,), (None, 5), (3,), (1, None, 4)]),
        num_state_slots=st.sampled_from([0, 0, 8, 6, 3, 1]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        expects_short_answers: bool,
        windows: tuple[int | None, ...],
        num_state_slots: int,
    ) -> None:
        config = make_config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            windows=windows,
            num_state_slots=num_state_slots,
        )
        self.scheduler = Scheduler(config)
        self.model = PagedModel(config)
        self.expects_short_answers = expects_short_answers
        self.live: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.num_added = 0

    @rule(arrivals=st.lists(st.tuples(prompts, sampling_params, st.sampled_from(Priority)), min_size=2, max_size=6))
    def add(self, arrivals: list[tuple[list[int], SamplingParams, Priority]]) -> None:
        for prompt, params, priority in arrivals:
            request = Request(f"r{self.num_added}", prompt, params, priority=priority, seed=0)
            self.num_added += 1
            try:
                self.scheduler.add(request)
            except CapacityError:
                config = self.scheduler.config
                chunk = config.max_num_batched_tokens
                assert most_blocks(config.windows, config.block_size, len(prompt), chunk) > config.num_blocks
            except QueueFullError:
                assert self.scheduler.num_waiting == self.scheduler.config.max_waiting
            else:
                self.live[request.request_id] = request
                self.answers[request.request_id] = []

    @rule(data=st.data(), is_in_flight=st.booleans())
    def abort(self, data: st.DataObject, is_in_flight: bool) -> None:
        output = self._schedule() if is_in_flight else SchedulerOutput([], 0, 0)
        sampled = self.model.execute(output)
        request_id = data.draw(st.sampled_from(["unknown", *self.live]))
        assert self.scheduler.abort(request_id) == (request_id in self.live)
        self.live.pop(request_id, None)
        self._commit(output, sampled)

    @rule(num_sampled=st.sampled_from([0, 1, 1, 1, 2, 3]), num_steps=st.integers(1, 8))
    def step(self, num_sampled: int = 1, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            output = self._schedule()
            self._commit(output, self.model.execute(output, num_sampled))
            self.scheduler.check_integrity()

    @invariant()
    def blocks_are_free_or_referenced(self) -> None:
        self.scheduler.check_integrity()
        if not self.live:
            assert self.scheduler.block_manager.num_free_blocks == self.scheduler.config.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # The best running request computes a token in each step; it may lose them to each better one that still waits.
        num_steps = len(self.live) * sum(request.num_tokens + request.max_tokens for request in self.live.values())
        for _ in range(num_steps):
            if self.live:
                self.step()
        assert not self.live
        assert not self.scheduler.has_requests

    def _schedule(self) -> SchedulerOutput:
        if self.expects_short_answers:
            # Admission then takes in too many, and preemption has to make up for it.
            for lengths in self.scheduler._answers.values():
                lengths.estimate = 1
        output, config = self.scheduler.schedule(), self.scheduler.config
        scheduled = [chunk.request for chunk in output.scheduled]
        assert bool(scheduled) == bool(self.live), "a step with live requests computes something"
        assert len(set(scheduled)) == len(scheduled) <= config.max_num_seqs
        slots = [request.state_slot for request in scheduled]
        assert len(set(slots)) == len(slots) or not config.num_state_slots, "no slot is shared"
        assert output.num_tokens == sum(chunk.num_tokens for chunk in output.scheduled) <= config.max_num_batched_tokens
        kinds = [chunk.is_prefill for chunk in output.scheduled]
        assert kinds == sorted(kinds), "decodes come first"
        if scheduled:
            assert min(self.scheduler._running, key=lambda request: request.rank) in scheduled
        for chunk in output.scheduled:
            request = chunk.request
            assert request in self.scheduler._running, "a preempted request is not in the step"
            for table in request.block_tables:
                room = len(table) * config.block_size
                assert 1 <= chunk.num_tokens <= room - request.num_computed_tokens
                written = table[request.num_computed_tokens // config.block_size :]
                counts = [self.scheduler.block_manager._ref_counts[block] for block in written]
                assert set(counts) == {1}, "shared and written"
            num_held = sum(1 for _ in held_blocks(request.block_tables))
            length = request.num_computed_tokens + chunk.num_tokens
            assert num_held <= most_blocks(config.windows, config.block_size, length, config.max_num_batched_tokens)
        return output

    def _commit(self, output: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        for result in self.scheduler.commit(output, sampled):
            answer = self.answers[result.request_id]
            answer.extend(result.token_ids)
            if result.finish_reason is not None:
                request = self.live.pop(result.request_id)
                config = self.scheduler.config
                alone = undisturbed_answer(request, config.windows, config.num_state_slots)
                assert (answer, result.finish_reason) == alone
                assert result.num_cached_tokens < result.num_prompt_tokens


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("num_blocks", [20, 8])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_bug_23_preempted_answers_equal_undisturbed_ones(num_blocks: int, enable_prefix_caching: bool) -> None:
    """Recomputing the prompt only, or appending its tokens twice, cut or changed answers after a preemption."""
    config = make_config(num_blocks=num_blocks, block_size=16, enable_prefix_caching=enable_prefix_caching)
    scheduler, model = Scheduler(config), PagedModel(config)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    requests = [Request(f"r{index}", [index, 2, 3], params, seed=0) for index in range(4)]
    for request in requests:
        scheduler.add(request)
    streamed: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while scheduler.has_requests:
        output = scheduler.schedule()
        for result in scheduler.commit(output, model.execute(output)):
            streamed[result.request_id].extend(result.token_ids)
        scheduler.check_integrity()
    assert scheduler.totals.preemptions > 0
    for request in requests:
        assert len(request.output_token_ids) == 100
        assert streamed[request.request_id] == request.output_token_ids == undisturbed_answer(request)[0]
    assert scheduler.totals.generation_tokens == 400
    assert scheduler.block_manager.num_free_blocks == num_blocks
