"""Who computes how many tokens in the next step, who waits, who gives up its blocks.

Knows requests, blocks and token counts; nothing of tensors, text or time. One step is `schedule`, the runner's work,
`commit`. `schedule` advances nothing: the answer and, but for admission and preemption, num_computed_tokens change in
`commit` alone, so a step that failed is simply scheduled again. A loop that overlaps steps must count the tokens in
flight as computed before it schedules the next step, and must skip what a request sampled before it was preempted.

Recurrent state is the exception: a step overwrites it, so that of a step that failed the requests must start anew.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from appliance.client import FinishReason, Priority, TokenLogprobs
from appliance.engine.block_manager import BlockManager, held_blocks, longest_request, most_blocks
from appliance.engine.request import Request, RequestStatus, StepOutput
from appliance.errors import CapacityError, ContextLengthError, QueueFullError

_NOTHING: Mapping[str, Sequence[TokenLogprobs]] = {}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler. Sizes are in blocks, tokens or requests as their names say."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    enable_prefix_caching: bool
    content_digest: bytes
    """Stands for all that changes KV besides the tokens: weights, configuration, KV dtype, adapter."""
    eos_token_ids: frozenset[int]
    windows: tuple[int | None, ...] = (None,)
    """Of each group of layers with a block table of its own; None for full attention."""
    num_state_slots: int = 0
    """Of recurrent layers, for requests and snapshots; 0 where there are no such layers."""
    initial_answer_tokens: int = 128
    """Expected length of an answer until enough have been seen."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_tokens` tokens of a request, from its num_computed_tokens on. Valid until the step is committed."""

    request: Request
    num_tokens: int
    is_prefill: bool
    """The chunk starts inside the prompt or holds more than one token."""

    @property
    def samples(self) -> bool:
        """The chunk reaches the last token, so its last row gives the next one."""
        return self.request.num_uncomputed_tokens == self.num_tokens

    @property
    def scored_positions(self) -> range:
        """Positions of the chunk whose logits tell how likely the prompt's next token was, where that is asked for."""
        request = self.request
        if request.params.prompt_logprobs is None:
            return range(0)
        start, stop = request.num_computed_tokens, request.num_computed_tokens + self.num_tokens
        # Those known already, from before a preemption, are left as they are.
        return range(max(start, len(request.prompt_logprobs)), min(stop, request.num_prompt_tokens - 1))


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: decodes first, then prefills."""

    scheduled: list[ScheduledRequest]
    num_tokens: int
    num_preempted: int
    state_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) slots of recurrent state, to be copied in this order before the step computes."""


@dataclass(slots=True)
class SchedulerTotals:
    """Counts since the start. A request's prompt is counted once, at its first admission."""

    preemptions: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class AnswerLengths:
    """The 75th percentile of the lengths of the last 64 answers, in tokens."""

    def __init__(self, initial: int) -> None:
        # 16 pretended answers: a few early ones do not swing the estimate.
        self._recent = deque([initial] * 16, maxlen=64)
        self.estimate = initial

    def record(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self.estimate = sorted(self._recent)[-(-3 * len(self._recent) // 4) - 1]


@dataclass(slots=True)
class _Step:
    """A step while it is being filled."""

    budget: int
    chunks: dict[Request, ScheduledRequest] = field(default_factory=dict)
    num_preempted: int = 0

    def add(self, request: Request, num_tokens: int) -> None:
        is_prefill = num_tokens > 1 or request.num_computed_tokens < request.num_prompt_tokens
        self.chunks[request] = ScheduledRequest(request, num_tokens, is_prefill)
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        chunk = self.chunks.pop(request, None)
        if chunk is not None:
            self.budget += chunk.num_tokens


class Scheduler:
    """Continuous batching with chunked prefill over one paged KV pool.

    Requests are ranked by (priority, arrival). The best running request is in every step and can always grow, because
    all others may be preempted for it and `add` cuts max_tokens to what the whole pool holds: nothing waits for ever.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.block_manager = BlockManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            content_digest=config.content_digest,
            windows=config.windows,
            num_state_slots=config.num_state_slots,
        )
        self._max_running = min(config.max_num_seqs, config.num_state_slots or config.max_num_seqs)
        self._longest = longest_request(
            config.windows, config.block_size, config.num_blocks, config.max_num_batched_tokens
        )
        self.totals = SchedulerTotals()
        self._answers = {priority: AnswerLengths(config.initial_answer_tokens) for priority in Priority}
        self._live: dict[str, Request] = {}
        self._num_arrivals = 0
        # Both in order of rank.
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    @property
    def has_requests(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: new ones and preempted ones."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request whose id no live request has, and resolve its max_tokens.

        Raises ContextLengthError if the context leaves no room for one output token, CapacityError if the prompt's KV
        alone does not fit the whole pool (the last token of an answer needs no KV, so one token can then be given), and
        QueueFullError if max_waiting requests wait.
        """
        assert request.request_id not in self._live, f"request id {request.request_id} is in use"
        config, manager = self.config, self.block_manager
        num_prompt, wish = request.num_prompt_tokens, request.params.max_tokens
        if num_prompt >= config.max_model_len:
            raise ContextLengthError(num_prompt, 1 if wish is None else wish, config.max_model_len)
        num_needed = most_blocks(config.windows, config.block_size, num_prompt, config.max_num_batched_tokens)
        if num_needed > manager.num_blocks:
            raise CapacityError(
                f"the prompt of {num_prompt} tokens needs {num_needed} KV blocks of {config.block_size} tokens, but "
                f"the whole pool has {manager.num_blocks}: shorten the prompt or give the KV cache more memory"
            )
        if len(self._waiting) >= config.max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting and the queue holds {config.max_waiting}: try again later"
            )
        room = min(config.max_model_len, self._longest + 1) - num_prompt
        request.max_tokens = room if wish is None else min(wish, room)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._live[request.request_id] = request
        insort(self._waiting, request, key=attrgetter("rank"))

    def abort(self, request_id: str) -> bool:
        """End a request without further output and free its blocks; False if no such request is live.

        Between `schedule` and `commit` only after the runner has read the block tables; `commit` then skips it.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def schedule(self) -> SchedulerOutput:
        """Fill one step: decodes, then prefills under way, then new requests as far as budget and blocks allow."""
        step = _Step(self.config.max_num_batched_tokens)
        for request in sorted(self._running, key=_is_prefilling):
            self._continue(request, step)
        # Blocks just taken from a victim are for those who run on, not for it or for newcomers.
        if not step.num_preempted:
            self._admit(step)
        scheduled = sorted(step.chunks.values(), key=lambda chunk: chunk.is_prefill)
        states = self.block_manager.states
        return SchedulerOutput(
            scheduled,
            self.config.max_num_batched_tokens - step.budget,
            step.num_preempted,
            states.drain_copies() if states and scheduled else (),
        )

    def commit(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, Sequence[int]],
        *,
        logprobs: Mapping[str, Sequence[TokenLogprobs]] = _NOTHING,
        prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = _NOTHING,
    ) -> list[StepOutput]:
        """Apply a step that has run: KV of its tokens is in the cache, `sampled` holds new tokens by request id.

        A request whose chunk samples may get any number of tokens; those after the one that ends it are dropped, and
        with none its last token is computed again. Requests aborted since `schedule` are skipped. By request id too:
        `logprobs` of the sampled tokens, `prompt_logprobs` of what follows each chunk's `scored_positions`.
        """
        outputs = []
        for chunk in output.scheduled:
            request = chunk.request
            if request.status is not RequestStatus.RUNNING:
                continue
            candidates, samples = sampled.get(request.request_id, ()), chunk.samples
            assert samples or not candidates, f"{request.request_id} has tokens from an unfinished prefill"
            request.prompt_logprobs += prompt_logprobs.get(request.request_id, ())
            num_before = len(request.output_token_ids)
            finish_reason, stop_token = self._append(request, candidates)
            request.num_computed_tokens = min(request.num_computed_tokens + chunk.num_tokens, request.num_tokens - 1)
            self.block_manager.register_full_blocks(request)
            if self.block_manager.states:
                self._keep_state(request, is_unanswered=samples and not candidates)
            token_ids = tuple(request.output_token_ids[num_before:])
            self.totals.generation_tokens += len(token_ids)
            if finish_reason is not None:
                self._end(request)
            if token_ids or finish_reason is not None:
                outputs.append(
                    StepOutput(
                        request.request_id,
                        token_ids,
                        finish_reason,
                        stop_token,
                        request.num_prompt_tokens,
                        request.num_cached_tokens,
                        tuple(logprobs.get(request.request_id, ())[: len(token_ids)]),
                        tuple(request.prompt_logprobs) if num_before == 0 else (),
                    )
                )
        return outputs

    def check_integrity(self) -> None:
        """Assert that blocks and requests agree. Costs O(pool): for tests and for idle moments."""
        assert len(self._live) == len(self._running) + len(self._waiting)
        for request in self._live.values():
            has_state = self.config.num_state_slots > 0 and request in self._running
            assert (request.state_slot is not None) == has_state, f"{request.request_id} has slot {request.state_slot}"
        for request in self._waiting:
            assert not request.block_tables, f"{request.request_id} waits with {request.block_tables}"
            assert request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"
        self.block_manager.check_integrity(self._running)

    def _continue(self, request: Request, step: _Step) -> None:
        """Schedule a running request's next tokens, preempting from the worst rank up while blocks are short."""
        if request.status is not RequestStatus.RUNNING or step.budget == 0:
            return
        num_tokens = self._chunk_length(request, step.budget)
        while not self.block_manager.grow(request, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            step.drop(victim)
            step.num_preempted += 1
            if victim is request:
                return
        step.add(request, num_tokens)

    def _chunk_length(self, request: Request, budget: int) -> int:
        """How many tokens of a request to compute at once: all, as far as the budget goes.

        Where a snapshot of recurrent state is to be kept, a chunk ends at the last whole block before the prompt's last
        token, or if it does not get that far at the last whole block it fills.
        """
        num_tokens = min(request.num_uncomputed_tokens, budget)
        if self.block_manager.states is None or not self.config.enable_prefix_caching:
            return num_tokens
        start, size = request.num_computed_tokens, self.config.block_size
        end = min(start + num_tokens, request.num_prompt_tokens - 1) // size * size
        return end - start if end > start else num_tokens

    def _keep_state(self, request: Request, *, is_unanswered: bool) -> None:
        """After a chunk: keep a snapshot, if it ended where one is wanted. is_unanswered: its last token, which is to
        be computed again, is in the state already, so that the request has to start anew.
        """
        if is_unanswered:
            self._preempt(request)
        elif self.config.enable_prefix_caching and request.num_computed_tokens < request.num_prompt_tokens:
            size = self.config.block_size
            if request.num_computed_tokens % size == 0:
                is_last = request.num_computed_tokens == (request.num_prompt_tokens - 1) // size * size
                self.block_manager.save_state(request, may_evict=is_last)

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a request; prompt and output are computed again when it is admitted next."""
        self._running.remove(request)
        self.block_manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.totals.preemptions += 1
        insort(self._waiting, request, key=attrgetter("rank"))

    def _admit(self, step: _Step) -> None:
        """Start waiting requests in order of rank while their expected blocks are free and spoken for by nobody.

        The first that does not fit ends it, so that small requests never starve a large one; a request that waits for
        its sibling's prompt holds up nobody. With nothing running it
        always fits: no answer is expected beyond max_tokens, which the whole pool holds. Budget left over means that
        every running request has tokens in this step, so there are never more of them than the budget has tokens.
        """
        if not self._waiting:
            return
        manager = self.block_manager
        num_promised = sum(self._num_missing_blocks(r, r.block_tables) for r in self._running)
        index = 0
        while index < len(self._waiting) and step.budget and len(self._running) < self._max_running:
            request = self._waiting[index]
            if self._awaits_sibling(request):
                index += 1
                continue
            prefix = manager.match_prefix(request)
            num_needed = self._num_missing_blocks(request, prefix) + manager.num_unreferenced(prefix)
            if num_needed > manager.num_free_blocks - num_promised:
                return
            del self._waiting[index]
            self._start(request, prefix)
            num_tokens = self._chunk_length(request, step.budget)
            has_grown = manager.grow(request, num_tokens)
            assert has_grown, f"{request.request_id} was admitted without room for {num_tokens} tokens"
            step.add(request, num_tokens)
            num_promised += self._num_missing_blocks(request, request.block_tables)

    def _start(self, request: Request, prefix: Sequence[Sequence[int]]) -> None:
        self.block_manager.allocate(request, prefix)
        request.num_computed_tokens = len(prefix[0]) * self.config.block_size
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=attrgetter("rank"))
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.totals.prompt_tokens += request.num_prompt_tokens
            if self.config.enable_prefix_caching and request.reads_prefix_cache:
                self.totals.prefix_cache_query_tokens += request.num_prompt_tokens
                self.totals.prefix_cache_hit_tokens += request.num_cached_tokens

    def _awaits_sibling(self, request: Request) -> bool:
        """Whether an answer to the same prompt is computing blocks of it that can be shared once they are there."""
        if not request.child_index or not self.config.enable_prefix_caching or not request.reads_prefix_cache:
            return False
        shareable = (request.num_prompt_tokens - 1) // self.config.block_size
        return any(
            other.num_computed_tokens // self.config.block_size < shareable
            and other.prompt_token_ids == request.prompt_token_ids
            for other in self._running
        )

    def _num_missing_blocks(self, request: Request, tables: Sequence[Sequence[int]]) -> int:
        """Blocks the request, with `tables`, is expected to take yet: for all its tokens and a usual answer's."""
        config = self.config
        num_answer = min(self._answers[request.priority].estimate, request.max_tokens)
        num_expected = max(request.num_tokens, request.num_prompt_tokens + num_answer - 1)
        chunk = min(max(request.num_uncomputed_tokens, 1), config.max_num_batched_tokens)
        num_needed = most_blocks(config.windows, config.block_size, num_expected, chunk)
        return max(0, num_needed - sum(1 for _ in held_blocks(tables)))

    def _append(self, request: Request, candidates: Sequence[int]) -> tuple[FinishReason | None, int | None]:
        """Append tokens up to the first that ends the answer; return why it ended, and the stop token if one did it."""
        params = request.params
        for token in candidates:
            if not request.max_tokens:
                return FinishReason.LENGTH, None
            request.output_token_ids.append(token)
            num_output = len(request.output_token_ids)
            # min_tokens counts what comes before the ending token.
            if num_output > params.min_tokens:
                if token in self.config.eos_token_ids and not params.ignore_eos:
                    return FinishReason.STOP, None
                if token in params.stop_token_ids:
                    return FinishReason.STOP, token
            if num_output >= request.max_tokens:
                return FinishReason.LENGTH, None
        return None, None

    def _end(self, request: Request) -> None:
        (self._running if request.status is RequestStatus.RUNNING else self._waiting).remove(request)
        self.block_manager.free(request)
        request.status = RequestStatus.FINISHED
        del self._live[request.request_id]
        # Aborted answers count too: a stop string is found outside the engine and ends a request by abort.
        if request.output_token_ids:
            self._answers[request.priority].record(len(request.output_token_ids))


def _is_prefilling(request: Request) -> bool:
    return request.num_computed_tokens < request.num_prompt_tokens or request.num_uncomputed_tokens > 1
