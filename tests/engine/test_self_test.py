"""A damaged model at load: refused with a code, or served with warnings on every surface if that is wished."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance import AsyncLLMEngine, SamplingParams
from appliance.client import FinishReason
from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.messages import Ready, decode_from_engine, encode
from appliance.errors import SelfTestError
from appliance.model_details import Verdict
from tests.appliance.tiny_model import EXACT
from tests.appliance.tokenizer_files import byte_level_bpe, save_byte_level_bpe
from tests.models.tiny import save_tiny

DAMAGED = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound quantised model."""
    path = tmp_path_factory.mktemp("model")
    save_byte_level_bpe(path)
    save_tiny(path, is_quantized=True, vocab_size=byte_level_bpe().get_vocab_size())
    return path


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """The same with one exponent's highest bit flipped and a norm of NaN."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DAMAGED}.scales"].view(torch.int16)[0, 0] ^= 0x4000
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def load(folder: Path, *, allowed: bool = False) -> EngineCore:
    return EngineCore.load(
        EngineConfig(str(folder), dtype="bfloat16", num_kv_blocks=16, allow_failed_self_test=allowed)
    )


def test_a_sound_model_passes_and_its_details_reach_the_front_process_whole(folder: Path) -> None:
    info = load(folder).model_info
    assert info.details is not None
    assert info.warnings == ()
    assert info.details.self_test.verdict is Verdict.PASSED
    assert sum(layer.count for layer in info.details.layers) == 9
    assert {test.kernel for test in info.details.self_test.kernels} == set(info.kernels)
    ready = decode_from_engine(encode(Ready(info)))
    assert isinstance(ready, Ready)
    assert ready.model_info == info


def test_a_damaged_model_is_refused_with_a_stable_code(damaged: Path) -> None:
    with pytest.raises(SelfTestError) as refusal:
        load(damaged)
    assert refusal.value.code == "self_test_failed"
    assert f"2 faults, the first: {DAMAGED}: its largest scale is" in refusal.value.message
    assert "--allow-failed-self-test" in refusal.value.message


def test_a_damaged_model_is_served_on_demand_with_warnings(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    info = load(damaged, allowed=True).model_info
    assert info.details is not None
    assert info.warnings[0].startswith("This model failed its self-test and is served all the same, as asked: 2 faults")
    assert info.details.self_test.verdict is Verdict.FAILED
    assert info.details.self_test.faults[1] == "model.norm.weight: it holds NaN or infinity"
    logged = [record.getMessage() for record in caplog.records]
    assert "self-test: model.norm.weight: it holds NaN or infinity" in logged


async def test_its_answers_end_with_an_error_and_the_cause_through_the_engine_process(damaged: Path) -> None:
    engine = AsyncLLMEngine.from_engine_args({**EXACT, "model": str(damaged), "allow_failed_self_test": True})
    try:
        answers = [output async for output in engine.generate("hello", SamplingParams(max_tokens=4), request_id="1")]
    finally:
        engine.shutdown()
    (last,) = answers[-1].outputs
    assert last.finish_reason is FinishReason.ERROR
    assert "NaN" in last.error
