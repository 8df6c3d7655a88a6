"""Loads a model onto its device and runs one step of it. Knows no requests, only `InputBatch`es."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from appliance.client import MemoryUse
from appliance.config import EngineConfig
from appliance.engine.describe import ModelFiles, describe_model
from appliance.engine.input_batch import InputBatch
from appliance.engine.kv_cache import (
    GPU_RESERVE,
    CachePlan,
    allocate_cache,
    bytes_per_block,
    plan_cache,
    pool_bytes_on_cpu,
    step_bytes,
)
from appliance.engine.load_plan import device_of, name_of, plan_target
from appliance.engine.memory import CudaMemory, memory_of
from appliance.engine.sampler import Sampler, SamplingRow
from appliance.engine.scheduler import ScheduledRequest
from appliance.errors import SelfTestError
from appliance.generation_config import tokenizer_vocab_size
from appliance.kernels.backend import PagedLayout
from appliance.kernels.gated_delta import StateRows
from appliance.model_details import ExpectedMemory, ModelDetails, Verdict
from appliance.models.config import ModelConfig
from appliance.models.decoder import DecoderModel
from appliance.models.model_step import ModelStep
from appliance.models.recurrent_state import RecurrentState
from appliance.models.registry import architecture_of, read_model_config
from appliance.models.weights import WeightReader
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.planner import LinearPlanner
from appliance.quant.report import FormatReport
from appliance.sampling_params import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Facts about what was loaded."""

    architecture: str
    report: FormatReport
    kernels: tuple[str, ...]
    dtype: torch.dtype
    device: str
    """cpu, or cuda and which card."""
    memory: MemoryUse
    is_text_part: bool
    """Of a model that takes images too."""
    details: ModelDetails
    vocab_size: int
    """Token ids that may be read and sampled: rows of the embedding, less those that the tokenizer has no token for."""
    content_digest: bytes
    """Stands for weights, configuration and KV dtype in the keys of the prefix cache."""
    warnings: tuple[str, ...]


class ModelRunner:
    """The model, its KV cache and `execute`."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None]) -> None:
        """Raises CheckpointError, UnsupportedModelError or UsageError with a sentence for the user."""
        self.backend = device_of(config)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        device, memory = self.backend.device, memory_of(self.backend.device)
        available = memory.available()
        others = max(memory.total - available - memory.held(), 0)
        progress("reading", 0.0)
        checkpoint = open_checkpoint(config.model)
        try:
            architecture = architecture_of(checkpoint.config)
            declared = read_model_config(checkpoint.config, architecture)
            model_config = declared.within(config.max_model_len)
            target, warnings = plan_target(config.dtype, self.backend, checkpoint.config, model_config, available)
            dtype, planner = target.dtype, LinearPlanner(target)
            reader = WeightReader(checkpoint, planner, model_config.names)
            self.model = DecoderModel(
                model_config, reader, self.backend, lambda fraction: progress("loading", fraction)
            )
        finally:
            checkpoint.close()
        warnings += _judge(planner, config.allow_failed_self_test)
        vocab_size = min(model_config.vocab_size, tokenizer_vocab_size(config.model) or model_config.vocab_size)
        step_measured: int | None = None
        if isinstance(memory, CudaMemory):
            step_measured = memory.peak_of(lambda: self._run_largest_step(config, model_config, dtype, vocab_size))
            free = memory.available()
            pool_bytes = free - step_measured - GPU_RESERVE
        else:
            free = memory.available()
            pool_bytes = pool_bytes_on_cpu(free)
        self.plan: CachePlan = plan_cache(config, model_config, dtype, free, pool_bytes)
        self.windows = tuple(group.window for group in model_config.paged_groups)
        self.cache = allocate_cache(self.plan.layout, len(model_config.paged_groups[0].layers), dtype, device)
        device_name = name_of(self.backend)
        step_predicted = step_bytes(model_config, config, vocab_size, dtype)
        self.state = _allocate_state(model_config, self.plan.num_state_slots, dtype, device)
        recurrent_state = self.state.nbytes if self.state else 0
        self.loaded = LoadedModel(
            architecture=architecture,
            is_text_part=model_config.is_text_part,
            report=checkpoint.report,
            kernels=reader.kernel_names,
            dtype=dtype,
            device=device_name,
            memory=MemoryUse(
                total=memory.total,
                others=others,
                weights=reader.nbytes,
                kv_cache=self.cache.nbytes,
                recurrent_state=recurrent_state,
                step_predicted=step_predicted,
                step_measured=step_measured,
                held=memory.held(),
            ),
            details=describe_model(
                ModelFiles.at(Path(config.model)),
                checkpoint.report,
                reader,
                declared,
                architecture,
                device_name,
                ExpectedMemory(
                    total=memory.total,
                    available=available,
                    weights=reader.nbytes,
                    step=step_predicted if step_measured is None else step_measured,
                    kv_bytes_per_token=bytes_per_block(model_config, 1, dtype),
                    kv_cache=self.cache.nbytes,
                    max_model_len=self.plan.max_model_len,
                    recurrent_state=recurrent_state,
                ),
                planner.self_test,
            ),
            vocab_size=vocab_size,
            content_digest=_content_digest(Path(config.model), dtype, reader.kernel_names),
            warnings=(*warnings, *model_config.warnings, *checkpoint.report.warnings, *self.plan.warnings),
        )

    def batches(self, scheduled: Sequence[ScheduledRequest]) -> list[InputBatch]:
        """A step as what runs one after the other: all of it, or on some devices decodes, then prefill chunks."""
        parts = [list(scheduled)]
        if self.backend.splits_phases:
            parts = [[c for c in scheduled if not c.is_prefill], [c for c in scheduled if c.is_prefill]]
        return [InputBatch.build(part, self.plan.layout.block_size) for part in parts if part]

    def execute(self, batches: Sequence[InputBatch]) -> Tensor:
        """Run one step: KV of all rows is written, logits [R, vocab_size] of the batches' `logits_rows` come back.

        Decodes have no scored rows, so the rows of two batches follow each other as those of one would.
        """
        return self._execute(batches, self.plan.layout, self.cache, self.state)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots of recurrent state, (source, destination), one after the other; before the step executes."""
        assert self.state is not None
        self.state.copy(copies)

    def _execute(
        self, batches: Sequence[InputBatch], layout: PagedLayout, cache: Tensor, state: RecurrentState | None
    ) -> Tensor:
        hidden = []
        for batch in (batch.to(self.backend.device) for batch in batches):
            attentions = [
                self.backend.attention(layout, slots, batch.query_start_loc, batch.seq_lens, tables, batch.num_decode)
                for slots, tables in zip(batch.slot_mappings, batch.block_tables, strict=True)
            ]
            rows = None if batch.state_slots is None else _state_rows(batch, batch.state_slots)
            step = ModelStep(batch.num_decode, attentions, cache, rows, state)
            hidden.append(self.model.hidden(batch.input_ids, batch.positions, step, batch.logits_rows))
        return self.model.logits(torch.cat(hidden) if len(hidden) > 1 else hidden[0])

    def _run_largest_step(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, vocab_size: int
    ) -> None:
        """A prompt that fills the step and whose tokens are all scored, then the largest batch sampled."""
        tokens, block_size = min(config.max_num_batched_tokens, model_config.max_position), config.block_size
        blocks = -(-tokens // block_size)
        layout = PagedLayout(blocks, model_config.num_kv_heads, block_size, model_config.head_dim)
        groups = model_config.paged_groups
        cache = allocate_cache(layout, len(groups[0].layers), dtype, self.backend.device)
        rows = torch.arange(tokens)
        batch = InputBatch(
            input_ids=torch.zeros_like(rows),
            positions=rows,
            slot_mappings=[rows] * len(groups),
            query_start_loc=[0, tokens],
            seq_lens=[tokens],
            block_tables=[[list(range(blocks))]] * len(groups),
            num_decode=0,
            logits_rows=rows,
            state_slots=torch.tensor([0]) if model_config.recurrent_layers else None,
        )
        state = _allocate_state(model_config, 1, dtype, self.backend.device)
        logits = self._execute([batch], layout, cache, state)[: config.max_num_seqs]
        row = SamplingRow(SamplingParams(temperature=1.0, top_p=0.9), 0, 0, (), (), ())
        Sampler(vocab_size)(logits, [row] * len(logits))


def _judge(planner: LinearPlanner, is_allowed: bool) -> list[str]:
    """Warnings of what the self-test found. Raises SelfTestError if that forbids serving the model."""
    self_test = planner.self_test
    log.info("self-test %s: %s", self_test.verdict, self_test.summary)
    warnings = [
        f"Kernel {test.kernel} is not used for layers like {test.layer}: {test.reason}."
        for test in self_test.kernels
        if test.reason
    ]
    if self_test.verdict is Verdict.FAILED:
        summary = self_test.summary
        if not is_allowed:
            raise SelfTestError(
                f"the model failed its self-test ({summary}): download or quantise it again; `appliance inspect` lists "
                "every fault, and --allow-failed-self-test (allow_failed_self_test in Python) serves it all the same"
            )
        warnings.insert(0, f"This model failed its self-test and is served all the same, as asked: {summary}.")
    return warnings


def _state_rows(batch: InputBatch, slots: Tensor) -> StateRows:
    """A request without tokens before this step has no state yet."""
    spans = pairwise(batch.query_start_loc)
    has_state = [length > stop - start for length, (start, stop) in zip(batch.seq_lens, spans, strict=True)]
    return StateRows(slots, batch.query_start_loc, has_state, batch.num_decode)


def _allocate_state(
    model: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device
) -> RecurrentState | None:
    if model.gated_delta is None or not model.recurrent_layers:
        return None
    return RecurrentState.allocate(model.gated_delta, len(model.recurrent_layers), num_slots, dtype, device)


def _content_digest(model: Path, dtype: torch.dtype, kernels: tuple[str, ...]) -> bytes:
    """Digest of all that decides KV besides tokens. Files count by name, size and time: reading 20 GB would not do."""
    digest = hashlib.sha256(repr((str(dtype), kernels)).encode())
    for file in sorted(model.iterdir()) if model.is_dir() else [model]:
        stat = os.stat(file)
        digest.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.digest()
