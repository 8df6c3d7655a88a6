"""In the exact mode the greedy text of ten prompts is one text, whoever computes it and however."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.sampling_params import SamplingParams
from tests.builtin.reference import load_reference
from tests.builtin.serving import serving
from tests.prose import PASSAGES

NUM_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "How many days are in a week?",
    *(f"Summarise this in one sentence: {passage}" for passage in PASSAGES),
)
PLAIN = {"temperature": 0, "repetition_penalty": 1.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)["input_ids"]
        for q in QUESTIONS
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers in float32 on the same weights."""
    model = load_reference(folder, torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def ask(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(answers, prompts, strict=True):
        core.add(name, prompt, GREEDY)
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
    assert core.stats().kv_blocks_free == core.stats().kv_blocks_total
    return list(answers.values())


def test_engine_equals_transformers_however_it_is_scheduled(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Alone, in a batch of 16, prefix cache cold and warm, chunked, and after a forced preemption."""
    core = EngineCore.load(EngineConfig(str(folder), dtype="float32", kv_cache_bytes=1 << 29))
    cold = [ask(core, [prompt])[0] for prompt in prompts]
    assert cold == expected
    assert ask(core, prompts + prompts[:6]) == expected + expected[:6]
    assert core.stats().prefix_cache_hit_tokens > 500

    chunked = EngineConfig(str(folder), dtype="float32", num_kv_blocks=24, max_num_batched_tokens=24)
    core = EngineCore.load(chunked)
    # Short answers teach admission to expect short ones: then it lets in more than the pool can finish.
    for _ in range(64):
        core.add("short", [7, 8], SamplingParams(temperature=0.0, max_tokens=1))
        core.step()
    assert ask(core, prompts) == expected
    assert core.stats().preemptions > 0


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with serving(folder, "--dtype", "float32", "--kv-cache-memory", "512MiB") as running:
        yield running.base


async def test_http_equals_transformers(server: str, tokenizer: Any, expected: list[list[int]]) -> None:
    """Over HTTP, streamed and not, all at once."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]

    def body(question: str, **more: Any) -> Mapping[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"messages": messages, **PLAIN, "max_tokens": NUM_TOKENS, **more}

    async with httpx.AsyncClient(base_url=server, timeout=120) as client:

        async def whole(question: str) -> str:
            reply = await client.post("/v1/chat/completions", json=body(question))
            return str(reply.json()["choices"][0]["message"]["content"])

        async def streamed(question: str) -> str:
            text = ""
            async with client.stream("POST", "/v1/chat/completions", json=body(question, stream=True)) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            return text

        assert await asyncio.gather(*map(whole, QUESTIONS)) == texts
        assert await asyncio.gather(*map(streamed, QUESTIONS)) == texts
        stats = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in stats.splitlines() if line and line[0] != "#")
    assert values["appliance_kv_blocks_free"] == values["appliance_kv_blocks_total"]
