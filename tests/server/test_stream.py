"""The form of streams on both endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.client import FinishReason
from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, answers_normally, events, in_process

CHAT = "/v1/chat/completions"


async def stream_of(client: FakeEngineClient, path: str = CHAT, keepalive_s: float = 15.0, **fields: Any) -> list[Any]:
    body = {"stream": True} | ({"messages": QUESTION} if path == CHAT else {"prompt": "Hi"}) | fields
    async with in_process(client, keepalive_s=keepalive_s) as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    return events(response.text)


def choice(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


async def test_chunks_come_in_the_order_of_the_protocol() -> None:
    chunks = await stream_of(FakeEngineClient([["He", "llo"]]))
    assert [chunk["choices"] for chunk in chunks] == [
        [choice({"role": "assistant", "content": ""})],
        [choice({"content": "He"})],
        [choice({"content": "llo"})],
        [choice({}, "stop") | {"stop_reason": None}],
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_only_when_asked_and_last() -> None:
    chunks = await stream_of(FakeEngineClient([["He", "llo"]]), stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert chunks[-1]["usage"]["total_tokens"] == chunks[-1]["usage"]["prompt_tokens"] + 2


async def test_usage_is_in_every_chunk_when_asked_so() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream_of(FakeEngineClient([["He", "llo"]]), stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2, 2]


async def test_text_of_any_script_and_control_characters_survive() -> None:
    texts = ["👩‍👩‍👧", "नमस्ते", '"\\\n\r\u2028\x00', "data: [x]\n\n", "漢字"]
    chunks = await stream_of(FakeEngineClient([texts]))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "".join(texts)


async def test_outputs_without_text_make_no_chunk() -> None:
    chunks = await stream_of(FakeEngineClient([["", "a", "", ""]]))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {},
    ]


async def test_silence_is_filled_with_empty_deltas() -> None:
    chunks = await stream_of(FakeEngineClient([["a", "b"]], delay=0.13), keepalive_s=0.05)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    first, second = deltas.index({"content": "a"}), deltas.index({"content": "b"})
    assert first >= 2
    assert second - first >= 2
    assert all(delta == {} for delta in deltas[1:first])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_no_keepalive_while_text_flows() -> None:
    chunks = await stream_of(FakeEngineClient([["a"] * 40], delay=0.02), keepalive_s=0.5)
    assert len(chunks) == 42


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_engine_that_dies_in_mid_stream_is_told_in_the_stream(path: str) -> None:
    client = FakeEngineClient(fail_after=2)
    chunks = await stream_of(client, path)
    assert chunks[-1]["error"]["code"] == "engine_dead"
    assert client.running == {}
    client.fail_after = None
    async with in_process(client) as http:
        assert await answers_normally(http)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_request_that_the_engine_gave_up_is_told_in_the_stream_with_its_cause(path: str) -> None:
    client = FakeEngineClient([["a", "b"]], finish_reason=FinishReason.ERROR, error="The scores are NaN.")
    chunks = await stream_of(client, path)
    assert chunks[-1]["error"]["code"] == "request_failed"
    assert chunks[-1]["error"]["message"] == "The scores are NaN."
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


async def test_refusals_come_before_the_first_byte() -> None:
    async with in_process(FakeEngineClient(max_model_len=16)) as http:
        response = await http.post(CHAT, json={"messages": QUESTION, "stream": True})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


async def test_completion_chunks_carry_text() -> None:
    chunks = await stream_of(FakeEngineClient([["He", "llo"]]), "/v1/completions")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "He", "llo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_a_batch_streams_side_by_side_with_one_usage() -> None:
    client = FakeEngineClient([["a", "b", "c"], ["x", "y", "z"]], delay=0.01)
    chunks = await stream_of(client, "/v1/completions", prompt=["one", "three"], stream_options={"include_usage": True})
    usage = chunks.pop()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 6)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [found["index"] for found in choices[:2]] == [0, 1]
    for index, text in enumerate(["abc", "xyz"]):
        mine = [found for found in choices if found["index"] == index]
        assert "".join(found["text"] for found in mine) == text
        assert [found["finish_reason"] for found in mine].count("stop") == 1
        assert mine[-1]["finish_reason"] == "stop"
    last_of_first = max(position for position, found in enumerate(choices) if found["index"] == 0)
    assert min(position for position, found in enumerate(choices) if found["text"] == "x") < last_of_first


async def test_a_cancelled_handler_frees_the_request() -> None:
    client = FakeEngineClient(delay=10)
    async with in_process(client) as http:
        task = asyncio.create_task(http.post(CHAT, json={"messages": QUESTION, "stream": True}))
        while not client.running:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert client.running == {}
    assert len(client.aborted) == 1
