"""Log probabilities and several answers on a tiny model: transformers' values, however they were computed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.client import FinishReason, TokenLogprobs
from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.input_batch import InputBatch
from appliance.engine.logprobs import token_logprobs
from appliance.engine.request import StepOutput
from appliance.sampling_params import SamplingParams
from tests.models.tiny import save_tiny_llama

SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (n,), generator=generator).tolist() for n in (1, 2, 17, 33, 70)]


def load(folder: Path, **settings: Any) -> EngineCore:
    return EngineCore.load(EngineConfig(str(folder), **{"dtype": "float32", "num_kv_blocks": 200, **settings}))


def drain(core: EngineCore) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.scheduler.check_integrity()
    assert core.stats().kv_blocks_free == core.stats().kv_blocks_total
    return outputs


def check(folder: Path, prompt: list[int], outputs: list[StepOutput]) -> None:
    """Every value is that of transformers' log-softmax over prompt and answer, to 1e-4."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = [token for output in outputs for token in output.token_ids]
    with torch.no_grad():
        expected = model(torch.tensor([prompt + answer])).logits[0].double().log_softmax(dim=-1)
    assert all(not output.prompt_logprobs for output in outputs[1:])
    found = [*outputs[0].prompt_logprobs, *(entry for output in outputs for entry in output.logprobs)]
    assert [entry.token_id for entry in found] == (prompt + answer)[1:]
    for row, entry in zip(expected, found, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(len(entry.top)).values.tolist(), abs=1e-4)
    for entry in found[len(prompt) - 1 :]:
        assert (entry.token_id, entry.logprob) == entry.top[0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}, {"block_size": 32, "num_kv_blocks": 60}],
    ids=repr,
)
def test_prompt_and_answer_have_transformers_values(
    folder: Path, prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    """Twice: public bug vllm#8268, log probabilities of a prompt whose prefix is cached."""
    core = load(folder, **settings)
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            core.add(str(i), prompt, SCORED)
        outputs = drain(core)
        for i, prompt in enumerate(prompts):
            check(folder, prompt, outputs[str(i)])


def test_preempted_requests_have_the_same_values_once(folder: Path, prompts: list[list[int]]) -> None:
    core = load(folder, num_kv_blocks=7, max_num_batched_tokens=8)
    for _ in range(64):  # short answers teach admission to expect short ones
        core.add("short", [7, 8], SamplingParams(temperature=0.0, max_tokens=1))
        drain(core)
    asked = {"a": prompts[3], "b": prompts[2], "c": prompts[3]}
    for name, prompt in asked.items():
        core.add(name, prompt, dataclasses.replace(SCORED, max_tokens=40))
    outputs = drain(core)
    assert core.stats().preemptions > 0
    for name, prompt in asked.items():
        assert sum(len(output.token_ids) for output in outputs[name]) == 40
        check(folder, prompt, outputs[name])


def test_scoring_a_prompt_alone_makes_no_token(folder: Path, prompts: list[list[int]]) -> None:
    core = load(folder)
    core.add("r", prompts[3], SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1))
    [output] = drain(core)["r"]
    assert (output.token_ids, output.finish_reason, output.logprobs) == ((), FinishReason.LENGTH, ())
    check(folder, prompts[3], [output])
    assert core.stats().generation_tokens == 0


def test_who_asks_for_nothing_gets_nothing_and_the_same_tokens(folder: Path, prompts: list[list[int]]) -> None:
    core = load(folder)
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    core.add("alone", prompts[4], plain)
    alone = drain(core)["alone"]
    core.add("plain", prompts[4], plain)
    core.add("scored", prompts[4], SCORED)
    outputs = drain(core)
    assert [output.token_ids for output in outputs["plain"]] == [output.token_ids for output in alone]
    assert [output.token_ids for output in outputs["scored"]] == [output.token_ids for output in alone]
    assert all(not output.logprobs and not output.prompt_logprobs for output in outputs["plain"])


def test_nan_in_a_prompts_rows_ends_that_request_alone(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = load(folder)
    execute = core.runner.execute

    def poisoned(batches: Sequence[InputBatch]) -> Tensor:
        logits = execute(batches).clone()
        if core.num_steps == 0:
            logits[10] = float("nan")
        return logits

    monkeypatch.setattr(core.runner, "execute", poisoned)
    core.add("good", prompts[2], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    core.add("bad", prompts[3], SCORED)
    outputs = drain(core)
    assert [output.finish_reason for output in outputs["bad"]] == [FinishReason.ERROR]
    assert sum(len(output.token_ids) for output in outputs["good"]) == 3


@pytest.mark.parametrize("seed", [None, 3, -1])
def test_answers_to_one_prompt_differ_and_share_its_blocks(
    folder: Path, prompts: list[list[int]], seed: int | None
) -> None:
    core = load(folder)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)

    def ask(prompt: list[int]) -> list[tuple[int, ...]]:
        for k in range(4):
            core.add(str(k), prompt, params, child_index=k)
        outputs = drain(core)
        return [tuple(token for output in outputs[str(k)] for token in output.token_ids) for k in range(4)]

    answers = ask(prompts[4])
    assert len(set(answers)) == 4
    assert core.stats().prefix_cache_hit_tokens == 3 * 64
    assert (ask(prompts[4]) == answers) is (seed is not None)
    core.add("alone", prompts[4], params)
    alone = tuple(token for output in drain(core)["alone"] for token in output.token_ids)
    assert (alone == answers[0]) is (seed is not None)


@pytest.mark.parametrize(("rows", "num_top"), [*itertools.product([0, 1, 64, 65, 130], [0, 1, 50])])
def test_any_number_of_rows_is_told_row_by_row(rows: int, num_top: int) -> None:
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows))
    token_ids = [row % 40 for row in range(rows)]
    found = token_logprobs(logits, token_ids, num_top)
    one_by_one = [token_logprobs(logits[i : i + 1], [token_ids[i]], num_top)[0] for i in range(rows)]
    assert found == one_by_one
    assert all(len(entry.top) == min(num_top, 40) for entry in found)
    assert all(math.isfinite(entry.logprob) and isinstance(entry, TokenLogprobs) for entry in found)
