"""Finds out all about a model without loading it: one module in memory at a time, one layer of each kind packed and
tested. Of a model on the hub only the headers are read.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from appliance.config import EngineConfig
from appliance.engine.describe import ModelFiles, describe_model
from appliance.engine.kv_cache import (
    GPU_RESERVE,
    bytes_per_block,
    plan_cache,
    pool_bytes_on_cpu,
    state_bytes,
    step_bytes,
)
from appliance.engine.load_plan import device_of, name_of, plan_target
from appliance.engine.memory import memory_of
from appliance.errors import CheckpointError, UsageError
from appliance.hub import HubModel
from appliance.model_details import ExpectedMemory, ModelDetails, SelfTest, Verdict
from appliance.model_source import resolve_model
from appliance.models.header_reader import HeaderReader
from appliance.models.registry import architecture_of, read_model_config
from appliance.models.survey import survey
from appliance.models.weights import WeightReader
from appliance.quant.checkpoint import Checkpoint, open_checkpoint, open_headers
from appliance.quant.header_files import HeaderFiles
from appliance.quant.model_folder import weight_files
from appliance.quant.planner import LinearPlanner

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_UNTESTED = "the weights were not read, as asked (--no-self-test)"
_REMOTE = "only the headers of a model on the hub are read; download it to have it tested"


def inspect_model(
    model: str | None, config: EngineConfig, progress: Callable[[str, float], None], runs_self_test: bool = True
) -> ModelDetails:
    """model: a folder, a .gguf file, an id of the hub (owner/name, where no such path exists), None: the built-in one.

    config: how it would be served; its `model` is not looked at. Raises what loading the model would raise, but not
    SelfTestError: the verdict is in the details.
    """
    try:
        path = None if model is None else Path(model).expanduser()
        exists = path is not None and path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, a user that is not there
        raise UsageError(f"{model!r:.200} is no path that could be looked at ({error!s:.100}): check it") from error
    if path is not None and not exists and _HUB_ID.fullmatch(str(model)) and path.suffix != ".gguf":
        return _inspect_remote(str(model), config, progress)
    if path is None or not (path.is_file() and path.suffix.lower() == ".gguf"):
        path = resolve_model(model, progress)
    progress(f"Inspecting {path.name}", 0.0)
    checkpoint = open_checkpoint(path)
    try:
        skipped = None if runs_self_test else SelfTest(Verdict.NOT_RUN, _UNTESTED)
        return _inspect(checkpoint, ModelFiles.at(path), config, skipped)
    finally:
        checkpoint.close()


def _inspect_remote(repo_id: str, config: EngineConfig, progress: Callable[[str, float], None]) -> ModelDetails:
    reading = f"Reading the headers of {repo_id}"
    progress(reading, 0.0)
    remote = HubModel(repo_id)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        remote.mirror(folder)
        try:
            shards, weight_map = weight_files(folder)
            names = [shard.name for shard in shards]
            headers = remote.headers(names, lambda fraction: progress(reading, fraction))
            checkpoint = open_headers(folder, HeaderFiles(headers, weight_map))
        except CheckpointError as error:
            raise type(error)(error.message.replace(name, repo_id)) from error
        files = ModelFiles(repo_id, remote.nbytes(names), remote.has_chat_template)
        return _inspect(checkpoint, files, config, SelfTest(Verdict.NOT_RUN, _REMOTE))


def _inspect(checkpoint: Checkpoint, files: ModelFiles, config: EngineConfig, skipped: SelfTest | None) -> ModelDetails:
    """skipped: what to say of the self-test where no weight is to be read."""
    backend = device_of(config)
    memory = memory_of(backend.device)
    available = memory.available()
    architecture = architecture_of(checkpoint.config)
    declared = read_model_config(checkpoint.config, architecture)
    model = declared.within(config.max_model_len)
    target, warnings = plan_target(config.dtype, backend, checkpoint.config, model, available)
    warnings += model.warnings
    planner = LinearPlanner(target, keeps_layers=False)
    make_reader = WeightReader if skipped is None else HeaderReader
    reader = make_reader(checkpoint, planner, model.names)
    survey(model, reader, backend)

    step = step_bytes(model, config, model.vocab_size, target.dtype)
    free = available - reader.nbytes
    on_card = backend.device.type == "cuda"
    pool_bytes = free - step - GPU_RESERVE if on_card else pool_bytes_on_cpu(max(free, 0))
    kv_cache = recurrent_state = max_model_len = 0
    try:
        plan = plan_cache(config, model, target.dtype, free, pool_bytes)
    except UsageError as error:
        warnings.append(error.message)
    else:
        warnings += plan.warnings
        kv_cache = plan.layout.num_blocks * bytes_per_block(model, config.block_size, target.dtype)
        recurrent_state = state_bytes(model, plan.num_state_slots, target.dtype)
        max_model_len = plan.max_model_len
    expected = ExpectedMemory(
        total=memory.total,
        available=available,
        weights=reader.nbytes,
        step=step,
        kv_bytes_per_token=bytes_per_block(model, 1, target.dtype),
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        recurrent_state=recurrent_state,
    )
    details = describe_model(
        files,
        checkpoint.report,
        reader,
        declared,
        architecture,
        name_of(backend),
        expected,
        skipped or planner.self_test,
    )
    return replace(details, warnings=(*details.warnings, *warnings))
