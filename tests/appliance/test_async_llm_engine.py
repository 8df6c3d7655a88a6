"""`AsyncLLMEngine` on a tiny model, with the real engine process: from any loop, and never left behind."""

from __future__ import annotations

import ast
import asyncio
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance import LLM, AsyncLLMEngine, RequestOutput, SamplingParams
from appliance.errors import CheckpointError, ContextLengthError, EngineDeadError, InvalidRequestError, UsageError
from appliance.sampling_params import OutputKind
from tests.appliance.tiny_model import EXACT, save_tiny_model

ROOT = Path(__file__).parents[2]
WAITS_S = 20.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPTS = ["hello world", "a", "The sea is wide, and the world", "hello", "0123456789"]

LISTING = """
import asyncio
from appliance import AsyncLLMEngine

engine = AsyncLLMEngine.from_engine_args({
    "model": "meta-llama/Llama-3-8B-Instruct",
    "dtype": "bfloat16"
})

async def generate(prompt):
    outputs = []
    async for result in engine.generate(prompt, sampling_params, request_id=f"req-{hash(prompt)}"):
        outputs.append(result.outputs[0].text)
    return "".join(outputs)

responses = await asyncio.gather(*[generate(p) for p in prompts])
"""
"""Of the article this project answers; the import is the only line changed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncLLMEngine]:
    """Built outside of any event loop; each test then brings a loop of its own."""
    engine = AsyncLLMEngine(folder, **EXACT)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    outputs = LLM(folder, **EXACT).generate(PROMPTS, GREEDY)
    return {prompt: output.outputs[0].text for prompt, output in zip(PROMPTS, outputs, strict=True)}


async def answer(engine: AsyncLLMEngine, prompt: Any, request_id: str | None = None) -> str:
    return "".join([o.outputs[0].text async for o in engine.generate(prompt, GREEDY, request_id=request_id)])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAITS_S):
        while not condition():
            await asyncio.sleep(0.01)


async def assert_idle(engine: AsyncLLMEngine) -> None:
    def is_idle() -> bool:
        stats = engine._thread.client.stats
        return stats.requests_running + stats.requests_waiting == 0 and stats.kv_blocks_free == stats.kv_blocks_total

    await until(is_idle)


def engine_processes() -> set[psutil.Process]:
    return {p for p in psutil.Process().children() if "appliance.engine" in p.cmdline()}


def client_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "engine client"}


async def test_joined_deltas_are_the_answer(engine: AsyncLLMEngine, expected: dict[str, str]) -> None:
    answers = await asyncio.gather(*[answer(engine, prompt) for prompt in PROMPTS])
    assert dict(zip(PROMPTS, answers, strict=True)) == expected


async def test_token_ids_are_a_prompt_too(engine: AsyncLLMEngine, expected: dict[str, str]) -> None:
    outputs = [output async for output in engine.generate("hello world", GREEDY)]
    assert outputs[0].prompt == "hello world"
    assert await answer(engine, outputs[0].prompt_token_ids) == expected["hello world"]


async def test_cumulative_outputs_hold_the_answer_so_far(engine: AsyncLLMEngine, expected: dict[str, str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, output_kind="cumulative")
    outputs = [output async for output in engine.generate("hello", params, request_id="mine")]
    answers = [output.outputs[0] for output in outputs]
    assert answers[-1].text == expected["hello"]
    assert len(answers[-1].token_ids) == 16
    assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(answers))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert answers[-1].finish_reason == "length"
    assert {output.request_id for output in outputs} == {"mine"}


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
async def test_log_probabilities_follow_the_tokens(engine: AsyncLLMEngine, kind: OutputKind) -> None:
    params = replace(GREEDY, logprobs=0, output_kind=kind)
    async for output in engine.generate("hello world", params):
        [answer] = output.outputs
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids


async def test_two_live_requests_of_one_id_both_finish(engine: AsyncLLMEngine, expected: dict[str, str]) -> None:
    answers = await asyncio.gather(answer(engine, "hello", "same"), answer(engine, "a", "same"))
    assert list(answers) == [expected["hello"], expected["a"]]


async def test_leaving_the_loop_frees_the_blocks(engine: AsyncLLMEngine) -> None:
    async def leave() -> None:
        async for _ in engine.generate("hello", ENDLESS):
            break

    await leave()
    await assert_idle(engine)
    stream = engine.generate("hello", ENDLESS)
    await anext(stream)
    await stream.aclose()
    await assert_idle(engine)


async def test_a_cancelled_task_frees_the_blocks(engine: AsyncLLMEngine) -> None:
    tasks = [asyncio.create_task(_collect(engine, ENDLESS)) for _ in range(6)]
    for task in tasks:  # some before they are submitted, some in full flow
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await assert_idle(engine)


async def _collect(
    engine: AsyncLLMEngine, params: SamplingParams, request_id: str | None = None
) -> list[RequestOutput]:
    return [output async for output in engine.generate("hello", params, request_id=request_id)]


async def test_abort_ends_the_requests_of_an_id(engine: AsyncLLMEngine, expected: dict[str, str]) -> None:
    async def aborted() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate("hello", ENDLESS, request_id="gone"):
            outputs.append(output)
            await engine.abort("gone")
        return outputs

    outputs, untouched = await asyncio.gather(aborted(), answer(engine, "a"))
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert [output.finished for output in outputs].count(True) == 1
    assert sum(len(output.outputs[0].token_ids) for output in outputs) < 200
    assert untouched == expected["a"]
    await engine.abort("unknown")
    await assert_idle(engine)


def test_one_engine_serves_one_event_loop_after_another(engine: AsyncLLMEngine, expected: dict[str, str]) -> None:
    before = engine_processes()
    for _ in range(3):
        assert asyncio.run(answer(engine, "hello")) == expected["hello"]

    async def begin() -> None:
        await anext(engine.generate("hello", ENDLESS))

    asyncio.run(begin())
    asyncio.run(assert_idle(engine))
    assert engine_processes() == before


def test_a_loop_closed_over_a_request_ends_it_quietly(engine: AsyncLLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def be_busy() -> None:
        time.sleep(0.2)  # the client hears of the end of the loop after it

    async def begin() -> None:
        await anext(engine.generate("hello", ENDLESS))
        engine._thread.submit(be_busy())

    asyncio.run(begin())
    asyncio.run(assert_idle(engine))
    gc.collect()
    assert not caplog.messages


def test_one_engine_serves_several_event_loops_at_once(engine: AsyncLLMEngine, expected: dict[str, str]) -> None:
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(answer(engine, "a")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAITS_S)
    assert answers == [expected["a"]] * 4


@pytest.mark.parametrize(
    ("prompt", "error", "sentence"),
    [
        ("", InvalidRequestError, "The prompt is empty"),
        ([268], InvalidRequestError, "Token id 268 is out of range"),
        ([5] * 300, ContextLengthError, "maximum context length is 256"),
        (None, InvalidRequestError, "found NoneType"),
    ],
)
async def test_a_bad_prompt_is_refused(
    engine: AsyncLLMEngine, prompt: Any, error: type[InvalidRequestError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        await answer(engine, prompt)
    assert caught.value.param == "prompt"


def test_the_listing_of_the_article_runs_and_its_engine_ends_with_the_name(folder: Path) -> None:
    before = engine_processes()
    code = compile(
        LISTING.replace("meta-llama/Llama-3-8B-Instruct", str(folder)),
        "listing",
        "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )
    namespace: dict[str, Any] = {"prompts": PROMPTS, "sampling_params": GREEDY}
    asyncio.run(eval(code, namespace))
    assert len(namespace["responses"]) == len(PROMPTS)
    assert all(namespace["responses"])
    assert len(engine_processes() - before) == 1
    namespace.clear()
    gc.collect()
    assert engine_processes() == before


async def test_shutdown_ends_what_runs(folder: Path) -> None:
    before = engine_processes()
    engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, {"model": str(folder)}, dtype="float32")
    assert engine.model_info.dtype == "float32"
    stream = engine.generate("hello", ENDLESS)
    await anext(stream)
    engine.shutdown()
    engine.shutdown()
    assert engine_processes() == before
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError, match="shut down"):
        await answer(engine, "hello")


def test_no_engine_outlives_its_interpreter(folder: Path, tmp_path: Path) -> None:
    """A script without a main guard that never says shutdown and leaves a request in flight."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import asyncio, psutil
from appliance import AsyncLLMEngine, SamplingParams
engine = AsyncLLMEngine({str(folder)!r}, num_threads=1)
async def main():
    async for output in engine.generate("hello", SamplingParams(ignore_eos=True)):
        print(psutil.Process().children()[0].pid, flush=True)
        return
asyncio.run(main())
""")
    temporary = tmp_path / "t"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stderr == ""
    process_id = int(result.stdout)
    deadline = time.monotonic() + WAITS_S
    while psutil.pid_exists(process_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(process_id)
    assert list(temporary.iterdir()) == []


def test_a_model_that_cannot_be_loaded_is_told_at_once_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    threads, processes = client_threads(), engine_processes()
    broken = save_tiny_model(tmp_path / "broken")
    next(broken.glob("*.safetensors")).write_bytes(b"not tensors")
    with pytest.raises(CheckpointError):
        AsyncLLMEngine(broken)
    with pytest.raises(UsageError, match="no setting has this name"):
        AsyncLLMEngine.from_engine_args({"model": str(folder), "tensor_parallel_size": 2})
    assert engine_processes() == processes
    assert client_threads() == threads
