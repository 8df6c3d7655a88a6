"""Requests from text to text over a real engine process that has no model: it answers with the prompt's own tokens."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from appliance.client import EngineClient, EngineState, EngineStats, FinishReason, RequestOutput, RequestStream, Usage
from appliance.config import EngineConfig
from appliance.errors import (
    ApplianceError,
    CheckpointError,
    ContextLengthError,
    EngineDeadError,
    EngineLoadingError,
    InvalidRequestError,
    QueueFullError,
)
from appliance.local_client import LocalClient
from appliance.request_stream import LocalRequestStream
from appliance.sampling_params import SamplingParams
from tests.appliance import echo_engine, tokenizer_files

ROOT = Path(__file__).parents[2]
WAITS_S = 20.0
ENDLESS = SamplingParams(ignore_eos=True, max_tokens=1_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_files.save_byte_level_bpe(tmp_path / "model")


def client_of(folder: Path, behaviour: str = "well") -> LocalClient:
    command = (sys.executable, echo_engine.__file__, behaviour)
    return LocalClient(EngineConfig(model=str(folder)), engine_command=command)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[LocalClient]:
    client = client_of(folder)
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAITS_S):
        while not condition():
            await asyncio.sleep(0.005)


async def read(stream: RequestStream) -> list[RequestOutput]:
    async with asyncio.timeout(WAITS_S):
        return [output async for output in stream]


async def ask(client: EngineClient, text: str, params: SamplingParams | None = None) -> list[RequestOutput]:
    return await read(await client.submit(await client.encode_text(text), params or SamplingParams()))


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


async def test_an_answer_comes_as_text(folder: Path) -> None:
    async with running(folder) as client:
        outputs = await ask(client, "hello world 世界🙂")
        assert text_of(outputs) == "hello world 世界🙂"
        num_tokens = len(await client.encode_text("hello world 世界🙂"))
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].usage == Usage(num_tokens, num_tokens + 1)
        assert client.stats.generation_tokens == num_tokens + 1


async def test_a_chat_is_rendered_and_tokenized(folder: Path) -> None:
    async with running(folder) as client:
        token_ids = await client.encode_chat([{"role": "user", "content": "hello"}])
        rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert token_ids == await client.encode_text(rendered)


async def test_the_model_is_described_with_what_its_folder_says(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    async with running(folder) as client:
        info = client.model_info
        assert info is not None
        assert (info.architecture, info.has_chat_template) == ("Echo", True)
        assert info.default_sampling == {"temperature": 0.5}


async def test_without_a_chat_template_chats_are_refused_and_completions_work(tmp_path: Path) -> None:
    async with running(tokenizer_files.save_byte_level_bpe(tmp_path / "model", chat_template=None)) as client:
        assert client.model_info is not None
        assert not client.model_info.has_chat_template
        with pytest.raises(InvalidRequestError, match=r"no chat template.*chat_template\.jinja"):
            await client.encode_chat([{"role": "user", "content": "hello"}])
        assert text_of(await ask(client, "hello")) == "hello"


async def test_log_probabilities_come_with_the_tokens_and_the_prompts_once(folder: Path) -> None:
    async with running(folder) as client:
        prompt = await client.encode_text("hello 世")
        outputs = await ask(client, "hello 世", SamplingParams(logprobs=1, prompt_logprobs=0))
        assert [found.token_id for found in outputs[0].prompt_logprobs] == prompt[1:]
        assert all(not output.prompt_logprobs for output in outputs[1:])
        for output in outputs:
            assert [found.token_id for found in output.logprobs] == list(output.token_ids)
            assert all(found.top == ((found.token_id, 0.0),) for found in output.logprobs)
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        assert token_ids == [*prompt, echo_engine.END]
        assert b"".join(await client.token_bytes(token_ids)) == "hello 世<|im_end|>".encode()


async def test_text_and_tokens_are_translated_both_ways(folder: Path) -> None:
    async with running(folder) as client:
        token_ids = await client.encode_text("hello<pad> 🙂")
        assert await client.decode(token_ids) == "hello<pad> 🙂"
        assert await client.decode([]) == ""
        for wrong in (-1, echo_engine.VOCAB_SIZE, 1 << 70):
            with pytest.raises(InvalidRequestError, match=str(wrong)) as caught:
                await client.decode([65, wrong], param="tokens")
            assert caught.value.param == "tokens"


async def test_wishes_about_tokens_that_the_model_lacks_are_refused(folder: Path) -> None:
    """Public bug vllm#16529."""
    async with running(folder) as client:
        for params in (
            SamplingParams(logit_bias=((999_999, 5.0),)),
            SamplingParams(stop_token_ids=(echo_engine.VOCAB_SIZE,), min_tokens=1),
        ):
            with pytest.raises(InvalidRequestError, match="the model knows 0 to 267"):
                await client.submit([65], params)
        assert text_of(await ask(client, "hello")) == "hello"


async def test_a_stop_string_ends_the_engines_work(folder: Path) -> None:
    async with running(folder) as client:
        outputs = await ask(client, "abc def" * 50, SamplingParams(stop=("c d",), ignore_eos=True, max_tokens=10**6))
        assert text_of(outputs) == "ab"
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, "c d")
        assert outputs[-1].usage.completion_tokens == 5
        await until(lambda: client.stats.requests_running == 0)
        assert client.stats.generation_tokens < 50


async def test_twenty_abandoned_streams_leave_nothing_running(folder: Path) -> None:
    """Closed, dropped or broken off in a loop: the next request is served as if they had never been."""
    async with running(folder) as client:
        for number in range(20):
            stream = await client.submit([65], ENDLESS)
            await anext(stream)
            if number % 2:
                await stream.aclose()
                await stream.aclose()
                assert await read(stream) == []
            del stream
        gc.collect()
        await until(lambda: client.stats.requests_running == 0)
        assert text_of(await ask(client, "hello")) == "hello"


async def test_a_cancelled_reader_can_go_on(folder: Path) -> None:
    async with running(folder) as client:
        stream = await client.submit(await client.encode_text("hello world"), SamplingParams())
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        assert text_of(await read(stream)) == "hello world"


async def test_a_cancelled_submission_leaves_nothing_running(folder: Path) -> None:
    async with running(folder) as client:
        submission = asyncio.create_task(client.submit([echo_engine.WAIT], SamplingParams()))
        await asyncio.sleep(0)
        submission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submission
        assert text_of(await ask(client, "hello")) == "hello"
        await until(lambda: client.stats.requests_running == 0)


async def test_closing_ends_a_waiting_reader(folder: Path) -> None:
    async with running(folder) as client:
        stream = await client.submit([echo_engine.WAIT], SamplingParams())
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0.01)
        await stream.aclose()
        assert await reader == []


async def test_every_waiter_hears_of_a_dead_engine_and_the_next_request_works(folder: Path) -> None:
    async with running(folder) as client:
        waiting = [await client.submit([echo_engine.WAIT], SamplingParams()) for _ in range(5)]
        streaming = [await client.submit([66], ENDLESS) for _ in range(5)]
        readers = [asyncio.create_task(read(stream)) for stream in waiting + streaming]
        late = await client.submit([echo_engine.DIE], ENDLESS)
        submissions = [asyncio.create_task(client.submit([echo_engine.WAIT], SamplingParams())) for _ in range(5)]
        results = await asyncio.gather(read(late), *readers, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 11
        for submission in await asyncio.gather(*submissions, return_exceptions=True):
            if isinstance(submission, LocalRequestStream):
                with pytest.raises(EngineDeadError):
                    await read(submission)
            else:
                assert isinstance(submission, EngineDeadError)
        assert client.health.state is EngineState.RESTARTING
        with pytest.raises(EngineLoadingError, match="SIGKILL"):
            await client.submit([65], SamplingParams())
        assert await client.encode_text("A")
        await until(lambda: client.health.state is EngineState.READY)
        assert client.num_engine_restarts == 1
        assert text_of(await ask(client, "hello")) == "hello"


async def test_what_came_before_the_death_is_read_first(folder: Path) -> None:
    async with running(folder) as client:
        stream = await client.submit([echo_engine.DIE, 65, 66, 67], SamplingParams(skip_special_tokens=False))
        await until(lambda: client.health.state is EngineState.RESTARTING)
        assert [(await anext(stream)).token_ids for _ in range(2)] == [(echo_engine.DIE,), (65,)]
        with pytest.raises(EngineDeadError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_two_requests_with_one_id_both_finish(folder: Path) -> None:
    async with running(folder) as client:
        texts = ["hello", "world"]
        streams = [
            await client.submit(await client.encode_text(text), SamplingParams(), request_id="mine") for text in texts
        ]
        assert [stream.request_id for stream in streams] == ["mine", "mine"]
        assert [text_of(outputs) for outputs in await asyncio.gather(*map(read, streams))] == texts


async def test_many_streams_do_not_mix(folder: Path) -> None:
    async with running(folder) as client:
        texts = [f"answer {number} 世" * 5 for number in range(40)]
        outputs = await asyncio.gather(*(ask(client, text) for text in texts))
        assert list(map(text_of, outputs)) == texts


@pytest.mark.parametrize("prompt", [[], [-1], [65, echo_engine.VOCAB_SIZE], [1 << 40]])
async def test_prompts_that_no_model_takes_are_refused(folder: Path, prompt: list[int]) -> None:
    async with running(folder) as client:
        with pytest.raises(InvalidRequestError, match="empty" if not prompt else str(prompt[-1])) as caught:
            await client.submit(prompt, SamplingParams(), param="prompt")
        assert caught.value.param == "prompt"
        assert client.stats == EngineStats()


async def test_stop_tokens_that_no_model_has_are_refused(folder: Path) -> None:
    """Public bug vllm#54195: with min_tokens they killed the engine or touched another row."""
    async with running(folder) as client:
        with pytest.raises(
            InvalidRequestError, match="stop_token_ids names token id 268, but the model knows 0 to 267"
        ) as caught:
            await client.submit([65], SamplingParams(min_tokens=1, stop_token_ids=(3, echo_engine.VOCAB_SIZE)))
        assert caught.value.param == "stop_token_ids"
        assert text_of(await ask(client, "h")) == "h"


async def test_the_engines_refusals_are_raised_by_submit(folder: Path) -> None:
    async with running(folder) as client:
        with pytest.raises(ContextLengthError, match="maximum context length is 512") as caught:
            await client.submit([65] * 512, SamplingParams(max_tokens=3), param="prompt")
        assert caught.value.param == "prompt"
        assert caught.value.extra() == {"n_prompt_tokens": 512, "n_ctx": 512}
        waiting = [await client.submit([echo_engine.WAIT], SamplingParams()) for _ in range(echo_engine.MAX_WAITING)]
        with pytest.raises(QueueFullError, match="try again later"):
            await client.submit([65], SamplingParams())
        await waiting[0].aclose()
        assert text_of(await ask(client, "h")) == "h"


async def test_before_start_and_after_stop_requests_are_refused(folder: Path) -> None:
    client = client_of(folder)
    assert client.model_info is None
    for call in (client.encode_text("x"), client.encode_chat([]), client.submit([65], SamplingParams())):
        with pytest.raises(EngineLoadingError):
            await call
    await client.start()
    stream = await client.submit([echo_engine.WAIT], SamplingParams())
    await client.stop()
    with pytest.raises(EngineDeadError, match="stopped"):
        await read(stream)
    for call in (client.encode_text("x"), client.encode_chat([]), client.submit([65], SamplingParams())):
        with pytest.raises(EngineDeadError, match="stopped"):
            await call
    assert client.health.state is EngineState.STOPPED
    await client.stop()


async def test_a_load_error_is_raised_by_start(folder: Path) -> None:
    client = client_of(folder, "refusing")
    with pytest.raises(CheckpointError, match="the checkpoint is odd"):
        await client.start()
    assert client.health.state is EngineState.FAILED
    with pytest.raises(EngineDeadError, match="the checkpoint is odd"):
        await client.submit([65], SamplingParams())


async def test_a_missing_tokenizer_ends_the_start_at_once(tmp_path: Path) -> None:
    client = client_of(tmp_path, "late")
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        await client.start()
    assert time.monotonic() - started < 5
    assert client.health.state is EngineState.STOPPED


async def test_a_fault_in_one_requests_text_ends_that_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as client:
        good = await client.submit(await client.encode_text("hello"), SamplingParams(ignore_eos=True, max_tokens=100))
        bad = await client.submit([65], ENDLESS)
        monkeypatch.setattr(bad, "deliver", lambda output: 1 / 0)
        with pytest.raises(ApplianceError, match="cannot be turned into text"):
            await read(bad)
        assert text_of(await read(good)) == "hello"
        await until(lambda: client.stats.requests_running == 0)


def test_the_front_imports_neither_torch_nor_transformers(folder: Path) -> None:
    """They cost seconds and hundreds of megabytes; the front process has no use for them."""
    program = f"""
import sys
from appliance.async_llm_engine import AsyncLLMEngine
from appliance.model_text import ModelText
files = ModelText.load({str(folder)!r})
assert files.chat_template is not None
rendered = files.chat_template.render([{{"role": "user", "content": "hello"}}], {{}})
assert files.tokenizer.decode(files.tokenizer.encode_rendered(rendered))
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
