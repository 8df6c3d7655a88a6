"""Loads a model onto its device and runs one step of it. Knows no requests, only `InputBatch`es."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from appliance.config import EngineConfig
from appliance.engine.input_batch import InputBatch
from appliance.engine.kv_cache import CachePlan, allocate_cache, available_memory, plan_cache, resident_memory
from appliance.errors import UsageError
from appliance.generation_config import tokenizer_vocab_size
from appliance.kernels.cpu_attention import CpuAttention
from appliance.kernels.spec import Target
from appliance.models.decoder import DecoderModel
from appliance.models.registry import architecture_of, read_model_config
from appliance.models.weights import WeightReader
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.report import FormatReport

DENSE_SHARE = 0.25
"""Dense copies of quantised layers are kept while they take no more than this part of the available memory."""

DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.bfloat16,  # a CPU computes float16 40 to 120 times slower
    "half": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Facts about what was loaded."""

    architecture: str
    report: FormatReport
    kernels: tuple[str, ...]
    dtype: torch.dtype
    weight_bytes: int
    available_bytes: int
    """Before the load."""
    resident_bytes: int
    """After it: weights, libraries and whatever else the process holds; of the KV pool only what has been written."""
    vocab_size: int
    """Token ids that may be read and sampled: rows of the embedding, less those that the tokenizer has no token for."""
    content_digest: bytes
    """Stands for weights, configuration and KV dtype in the keys of the prefix cache."""
    warnings: tuple[str, ...]


class ModelRunner:
    """The model, its KV cache and `execute`."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None]) -> None:
        """Raises CheckpointError, UnsupportedModelError or UsageError with a sentence for the user."""
        if config.device == "cuda":
            raise UsageError("This version computes on the CPU only: leave --device at auto or cpu.")
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        dtype = DTYPES[config.dtype]
        warnings = []
        if config.dtype in ("float16", "half"):
            warnings.append("float16 on a CPU is computed in bfloat16, which is many times faster.")
        progress("reading", 0.0)
        checkpoint = open_checkpoint(config.model)
        try:
            architecture = architecture_of(checkpoint.config)
            model_config = read_model_config(checkpoint.config, architecture)
            available = available_memory()
            layers = model_config.num_layers * (
                2 * (model_config.num_heads + model_config.num_kv_heads) * model_config.head_dim
                + 3 * model_config.intermediate_size
            )
            dense_bytes = layers * model_config.hidden_size * dtype.itemsize
            # The exact mode is dense by definition; else a dense copy must leave room for everything else.
            keep_dense = dtype == torch.float32 or dense_bytes <= available * DENSE_SHARE
            reader = WeightReader(checkpoint, Target("cpu", dtype, keep_dense))
            # The table of positions is small beside a layer; the context is decided after the weights are in.
            self.model = DecoderModel(
                model_config, reader, model_config.max_position, lambda fraction: progress("loading", fraction)
            )
        finally:
            checkpoint.close()
        self.plan: CachePlan = plan_cache(config, model_config, dtype, available_memory())
        self.cache = allocate_cache(self.plan.layout, model_config.num_layers, dtype)
        self.loaded = LoadedModel(
            architecture=architecture,
            report=checkpoint.report,
            kernels=reader.kernel_names,
            dtype=dtype,
            weight_bytes=reader.nbytes,
            available_bytes=available,
            resident_bytes=resident_memory(),
            vocab_size=min(model_config.vocab_size, tokenizer_vocab_size(config.model) or model_config.vocab_size),
            content_digest=_content_digest(Path(config.model), dtype, reader.kernel_names),
            warnings=(*warnings, *checkpoint.report.warnings, *self.plan.warnings),
        )

    def execute(self, batch: InputBatch) -> Tensor:
        """Run one step: KV of all rows is written, logits [R, vocab_size] of `batch.logits_rows` come back."""
        attention = CpuAttention(
            self.plan.layout,
            batch.slot_mapping,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
            batch.num_decode,
        )
        return self.model(batch.input_ids, batch.positions, attention, self.cache, batch.logits_rows)


def _content_digest(model: Path, dtype: torch.dtype, kernels: tuple[str, ...]) -> bytes:
    """Digest of all that decides KV besides tokens. Files count by name, size and time: reading 20 GB would not do."""
    digest = hashlib.sha256(repr((str(dtype), kernels)).encode())
    for file in sorted(model.iterdir()) if model.is_dir() else [model]:
        stat = os.stat(file)
        digest.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.digest()
