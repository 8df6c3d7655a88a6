"""The openai package as the client, over a real socket, checking every answer against its own types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from appliance.client import EngineState
from tests.fake_client import FakeEngineClient
from tests.server.support import eventually, socket_server

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def base_url(engine: FakeEngineClient) -> Iterator[str]:
    with socket_server(engine) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="any", _strict_response_validation=True, max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake/model-4bit"]
    assert client.models.retrieve("fake/model-4bit").owned_by == "appliance"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=MESSAGES, max_completion_tokens=3)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer._request_id


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="default", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world!"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="default", messages=MESSAGES) as stream:
        answer = stream.get_final_completion()
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "Hello, world!")


def test_leaving_a_stream_aborts_the_request(client: openai.OpenAI, engine: FakeEngineClient) -> None:
    engine.answers = [["word "] * 1000]
    engine.delay = 0.002
    with client.chat.completions.create(model="default", messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: len(engine.aborted) == 1 and engine.running == {})


def test_completions(client: openai.OpenAI, base_url: str) -> None:
    answer = client.completions.create(model="default", prompt=["a", "b"])
    assert [choice.text for choice in answer.choices] == ["Hello, world!"] * 2
    # The package's own types know no finish_reason null, which OpenAI's service sends in every chunk but the last.
    with openai.OpenAI(base_url=base_url, api_key="any") as lenient:
        stream = lenient.completions.create(model="default", prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world!"


def test_several_answers_with_log_probabilities(client: openai.OpenAI, engine: FakeEngineClient) -> None:
    engine.answers = [["He", "llo"], ["B", "ye"]]
    options: Any = {"model": "default", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**options)
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Bye"]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["B", "ye"]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3, 3]
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1]
    with client.chat.completions.stream(**options) as stream:
        whole = stream.get_final_completion()
    assert [choice.message.content for choice in whole.choices] == ["Hello", "Bye"]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    streamed = whole.choices[0].logprobs
    assert streamed is not None
    assert streamed.content is not None
    assert [entry.token for entry in streamed.content] == ["He", "llo"]


def test_echoed_completions_with_log_probabilities(client: openai.OpenAI, base_url: str) -> None:
    scored = client.completions.create(model="default", prompt="Hi", logprobs=1).choices[0].logprobs
    assert scored is not None
    assert scored.token_logprobs == [-0.125, -0.25, -0.375, -0.5]
    prompts = [[72, 105], [72, 105, 33]]
    # The package's own types know no null for the first token of a prompt, which OpenAI's service sends.
    with openai.OpenAI(base_url=base_url, api_key="any") as lenient:
        answer = lenient.completions.create(model="default", prompt=prompts, echo=True, logprobs=1, max_tokens=1, n=2)
    assert [choice.text for choice in answer.choices] == ["HiHello", "HiHello", "Hi!Hello", "Hi!Hello"]
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "i", "!", "Hello"]


def test_errors_arrive_as_the_packages_own(client: openai.OpenAI, engine: FakeEngineClient) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be") as refused:
        client.chat.completions.create(model="default", messages=MESSAGES, temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="fake/model-4bit"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "x" * 5000}])
    engine.fail_after = 2
    with pytest.raises(openai.APIError, match="engine process ended"):
        list(client.chat.completions.create(model="default", messages=MESSAGES, stream=True))
    engine.fail_after = None
    assert client.chat.completions.create(model="default", messages=MESSAGES).choices


def test_the_package_waits_out_a_load(base_url: str, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def loaded_meanwhile(seconds: float) -> None:
        waits.append(seconds)
        engine.state = EngineState.READY

    monkeypatch.setattr("openai._base_client.time.sleep", loaded_meanwhile)
    engine.state = EngineState.LOADING
    with openai.OpenAI(base_url=base_url, api_key="any") as client:
        assert client.chat.completions.create(model="default", messages=MESSAGES).choices
    assert waits == [2]


async def test_async_chat_with_and_without_stream(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any", _strict_response_validation=True) as client:
        answer = await client.chat.completions.create(model="default", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello, world!"
        stream = await client.chat.completions.create(model="default", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Hello, world!"
