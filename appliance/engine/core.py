"""The engine: requests in, tokens out, one `step` at a time. Token ids only; text and processes live elsewhere."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from appliance.client import EngineStats, FinishReason, ModelInfo, Priority, TokenLogprobs
from appliance.config import EngineConfig
from appliance.engine.block_manager import most_blocks
from appliance.engine.logprobs import token_logprobs
from appliance.engine.model_runner import ModelRunner
from appliance.engine.request import Request, StepOutput
from appliance.engine.sampler import Sampler, SamplingRow
from appliance.engine.scheduler import ScheduledRequest, Scheduler, SchedulerConfig
from appliance.generation_config import eos_token_ids
from appliance.sampling_params import SamplingParams

_UNSAMPLED = (
    "The model's scores for the next token are NaN or infinite, or leave none to choose: if this happens again, "
    "its weights or a kernel are broken, which `appliance inspect MODEL` looks for."
)
"""The cause told to a request whose row cannot be sampled."""


class EngineCore:
    """Owns the scheduler, the model and the sampler. Used from one thread."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, eos: Sequence[int]) -> None:
        loaded, layout = runner.loaded, runner.plan.layout
        self.runner = runner
        self.eos_token_ids = tuple(eos)
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=layout.num_blocks,
                block_size=layout.block_size,
                max_model_len=runner.plan.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting=config.max_waiting,
                enable_prefix_caching=config.enable_prefix_caching,
                content_digest=loaded.content_digest,
                eos_token_ids=frozenset(eos),
                windows=runner.windows,
                num_state_slots=runner.plan.num_state_slots,
            )
        )
        self.sampler = Sampler(loaded.vocab_size)
        self.num_steps = 0
        self.model_info = ModelInfo(
            id=config.served_name or config.model,
            created=int(time.time()),
            architecture=loaded.architecture,
            is_text_part=loaded.is_text_part,
            format=loaded.report.describe(),
            bits=loaded.report.bits,
            kernels=loaded.kernels,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=loaded.device,
            max_model_len=runner.plan.max_model_len,
            vocab_size=loaded.vocab_size,
            num_kv_blocks=layout.num_blocks,
            block_size=layout.block_size,
            num_contexts=min(
                layout.num_blocks
                // most_blocks(
                    runner.windows, layout.block_size, runner.plan.max_model_len, config.max_num_batched_tokens
                ),
                runner.plan.num_state_slots or layout.num_blocks,
            ),
            has_chat_template=False,
            memory=loaded.memory,
            details=loaded.details,
            warnings=loaded.warnings,
        )

    @classmethod
    def load(
        cls, config: EngineConfig, progress: Callable[[str, float], None] = lambda stage, done: None
    ) -> EngineCore:
        """Read the model, plan its layers, allocate the KV pool. Raises ApplianceErrors made for the user."""
        runner = ModelRunner(config, progress)
        return cls(config, runner, [token for token in eos_token_ids(config.model) if token < runner.loaded.vocab_size])

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: Priority = Priority.NORMAL,
        child_index: int = 0,
    ) -> None:
        """Queue a request. Raises ContextLengthError, CapacityError or QueueFullError."""
        seed = secrets.randbits(64) if params.seed is None else params.seed % (1 << 64)
        self.scheduler.add(
            Request(request_id, prompt_token_ids, params, priority=priority, seed=seed, child_index=child_index)
        )

    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks; False if it has ended already."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests

    def step(self) -> list[StepOutput]:
        """schedule -> build batch -> execute -> sample -> commit. A row that cannot be sampled ends its request."""
        output = self.scheduler.schedule()
        if not output.scheduled:
            return []
        if output.state_copies:
            self.runner.copy_states(output.state_copies)
        logits = self.runner.execute(self.runner.batches(output.scheduled))
        sampling = [chunk for chunk in output.scheduled if chunk.samples]
        result = self.sampler(logits[: len(sampling)], [self._row(chunk) for chunk in sampling])
        sampled = {chunk.request.request_id: (token,) for chunk, token in zip(sampling, result.token_ids, strict=True)}
        logprobs = {sampling[row].request.request_id: (found,) for row, found in result.logprobs.items()}
        prompt_logprobs = self._score_prompts(output.scheduled, logits[len(sampling) :])
        faulty = {sampling[row].request for row in result.faulty}
        for chunk in output.scheduled:
            if any(math.isnan(found.logprob) for found in prompt_logprobs.get(chunk.request.request_id, ())):
                faulty.add(chunk.request)
        for request in faulty:
            self.scheduler.abort(request.request_id)
        outputs = self.scheduler.commit(output, sampled, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        outputs += [
            StepOutput(
                r.request_id, (), FinishReason.ERROR, None, r.num_prompt_tokens, r.num_cached_tokens, error=_UNSAMPLED
            )
            for r in faulty
        ]
        self.num_steps += 1
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot as of now."""
        scheduler, totals = self.scheduler, self.scheduler.totals
        return EngineStats(
            requests_running=scheduler.num_running,
            requests_waiting=scheduler.num_waiting,
            kv_blocks_total=scheduler.block_manager.num_blocks,
            kv_blocks_free=scheduler.block_manager.num_free_blocks,
            prefix_cache_query_tokens=totals.prefix_cache_query_tokens,
            prefix_cache_hit_tokens=totals.prefix_cache_hit_tokens,
            preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            steps=self.num_steps,
        )

    def _score_prompts(self, scheduled: Sequence[ScheduledRequest], logits: Tensor) -> dict[str, list[TokenLogprobs]]:
        """By request id: what logits [R, >= vocab_size], the rows of all scored positions, say of the tokens there."""
        scored: dict[str, list[TokenLogprobs]] = {}
        first = 0
        for chunk in scheduled:
            positions, request = chunk.scored_positions, chunk.request
            if not positions:
                continue
            rows = logits[first : first + len(positions), : self.model_info.vocab_size]
            token_ids = request.token_ids(positions.start + 1, positions.stop + 1)
            scored[request.request_id] = token_logprobs(rows, token_ids, request.params.prompt_logprobs or 0)
            first += len(positions)
        return scored

    def _row(self, chunk: ScheduledRequest) -> SamplingRow:
        request = chunk.request
        return SamplingRow(
            params=request.params,
            seed=request.seed,
            position=len(request.output_token_ids),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            # Ignored, they are tokens like others and min_tokens has nothing to mask.
            eos_token_ids=() if request.params.ignore_eos else self.eos_token_ids,
            child_index=request.child_index,
        )
