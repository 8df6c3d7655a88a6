"""The whole engine on a tiny model: in the exact mode an answer does not depend on how it was computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.client import FinishReason, Priority
from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.input_batch import InputBatch
from appliance.engine.request import StepOutput
from appliance.errors import ContextLengthError, UsageError
from appliance.sampling_params import SamplingParams
from tests.models.tiny import save_tiny_llama

LENGTHS = (3, 16, 17, 32, 33, 48, 60, 5, 64, 31)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def load(folder: Path, **settings: Any) -> EngineCore:
    return EngineCore.load(EngineConfig(str(folder), **{"dtype": "float32", "num_kv_blocks": 200, **settings}))


def drain(core: EngineCore) -> dict[str, list[StepOutput]]:
    """Step until idle; all blocks are free then."""
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(5000):
        if not core.has_work:
            break
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.scheduler.check_integrity()
    assert not core.has_work, "the engine did not come to rest"
    stats = core.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    return outputs


def answer(outputs: Sequence[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def ask(core: EngineCore, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        core.add(str(i), prompt, params)
    outputs = drain(core)
    return [answer(outputs[str(i)]) for i in range(len(prompts))]


def test_alone_equals_transformers(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    core = load(folder, enable_prefix_caching=False)
    assert [ask(core, [prompt])[0] for prompt in prompts] == expected


def test_batched_equals_alone(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    core = load(folder, enable_prefix_caching=False)
    assert ask(core, prompts + prompts[:6]) == expected + expected[:6]


def test_chunked_equals_whole(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert ask(load(folder, max_num_batched_tokens=7, enable_prefix_caching=False), prompts) == expected


def test_cached_equals_cold(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    core = load(folder)
    assert ask(core, prompts) == expected
    cold = core.stats().prefix_cache_hit_tokens
    assert ask(core, prompts) == expected
    assert core.stats().prefix_cache_hit_tokens > cold


def test_preempted_equals_undisturbed(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A pool too small for all: answers are recomputed from prompt and output, not cut and not repeated."""
    core = load(folder, num_kv_blocks=9)
    # Short answers teach admission to expect short ones, so it lets in more than the pool can finish.
    ask(core, [[7, 8]] * 64, SamplingParams(temperature=0.0, max_tokens=1))
    assert ask(core, prompts) == expected
    assert core.stats().preemptions > 0


def test_finish_reasons_and_usage(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    core = load(folder)
    third = expected[1][2]
    core.add("stop", prompts[1], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=(third,)))
    core.add("length", prompts[2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    outputs = drain(core)
    position = expected[1].index(third)
    assert answer(outputs["stop"]) == expected[1][: position + 1]
    assert outputs["stop"][-1].finish_reason is FinishReason.STOP
    assert outputs["stop"][-1].stop_token == third
    assert answer(outputs["length"]) == expected[2][:4]
    assert outputs["length"][-1].finish_reason is FinishReason.LENGTH


def test_context_end_is_length(folder: Path, prompts: list[list[int]]) -> None:
    core = load(folder, max_model_len=40)
    core.add("r", prompts[3], SamplingParams(temperature=0, ignore_eos=True))
    outputs = drain(core)["r"]
    assert len(answer(outputs)) == 40 - len(prompts[3])
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_seeded_answer_is_the_same_in_any_batch(folder: Path, prompts: list[list[int]]) -> None:
    """Public bug vllm#51226: the seed must count whatever the neighbours ask for."""
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=42, max_tokens=16, ignore_eos=True)
    core = load(folder)
    core.add("seeded", prompts[0], seeded)
    alone = answer(drain(core)["seeded"])
    core.add("unseeded", prompts[1], SamplingParams(temperature=0.8, max_tokens=16))
    core.add("seeded", prompts[0], seeded)
    core.add("greedy", prompts[2], GREEDY)
    assert answer(drain(core)["seeded"]) == alone


@pytest.mark.parametrize("params", [{"temperature": 1e-4}, {"temperature": 1e-40}, {"top_p": 1e-4}, {"top_k": 1}])
def test_cold_sampling_equals_greedy(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], params: dict[str, Any]
) -> None:
    """Public bug vllm#1623: tiny temperatures and top_p neither crash nor change the text."""
    assert ask(load(folder), prompts[:2], SamplingParams(max_tokens=24, ignore_eos=True, **params)) == expected[:2]


def test_nan_ends_one_request_alone(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = load(folder)
    execute = core.runner.execute

    def poisoned(batches: Sequence[InputBatch]) -> Tensor:
        logits = execute(batches).clone()
        if core.num_steps == 3:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(core.runner, "execute", poisoned)
    for name, prompt in zip("abc", prompts, strict=False):
        core.add(name, prompt, GREEDY)
    outputs = drain(core)
    assert outputs["b"][-1].finish_reason is FinishReason.ERROR
    assert "NaN" in outputs["b"][-1].error
    assert [answer(outputs[name]) for name in "ac"] == [expected[0], expected[2]]


def test_abort_at_any_moment_frees_everything(folder: Path, prompts: list[list[int]]) -> None:
    core = load(folder, num_kv_blocks=12, max_num_batched_tokens=16)
    for steps in range(12):
        for i, prompt in enumerate(prompts):
            core.add(str(i), prompt, GREEDY, Priority.BATCH if i % 2 else Priority.NORMAL)
        for _ in range(steps):
            core.step()
        for i in range(len(prompts)):
            core.abort(str(i))
        core.scheduler.check_integrity()
        assert not core.has_work
        assert core.stats().kv_blocks_free == 12


def test_requests_that_can_never_run_are_refused(folder: Path, prompts: list[list[int]]) -> None:
    """Public bug vllm#35541: a prompt larger than the pool is an error at once, and the next request runs."""
    core = load(folder, num_kv_blocks=3, max_model_len=200)
    assert core.model_info.warnings == (
        "The context of 200 tokens was reduced to 48, what the KV cache of 3 blocks holds (--kv-cache-memory makes it "
        "larger).",
    )
    for length in (48, 63, 300):
        with pytest.raises(ContextLengthError, match="maximum context length is 48"):
            core.add("big", [5] * length, GREEDY)
    assert len(ask(core, prompts[:1])[0]) == 24


def test_context_wishes_are_cut_with_both_numbers(folder: Path) -> None:
    core = load(folder, max_model_len=5000)
    assert core.model_info.max_model_len == 256
    assert any("5000" in warning and "256" in warning for warning in core.model_info.warnings)
    assert load(folder, num_kv_blocks=4).model_info.max_model_len == 64
    with pytest.raises(UsageError, match="at least one block"):
        load(folder, num_kv_blocks=None, kv_cache_bytes=10)


def test_bf16_runs_and_half_says_what_it_does(folder: Path, prompts: list[list[int]]) -> None:
    core = load(folder, dtype="half")
    assert core.model_info.dtype == "bfloat16"
    assert any("bfloat16" in warning for warning in core.model_info.warnings)
    assert len(ask(core, prompts[:3])[0]) == 24
