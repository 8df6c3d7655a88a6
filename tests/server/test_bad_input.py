"""Input that must be refused, each time followed by a request that must succeed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, answers_normally, in_process

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}

FLOAT_FIELDS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INT_FIELDS = ["top_k", "max_tokens", "max_completion_tokens", "min_tokens", "seed"]
BOOL_FIELDS = ["stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"]
MESSAGES = '"messages": [{"role": "user", "content": "Hi"}]'


async def refused(body: str | bytes, status: int = 400, headers: dict[str, str] = JSON, path: str = CHAT) -> Any:
    """The error object of a refusal that leaves the server well."""
    client = FakeEngineClient()
    async with in_process(client) as http:
        response = await http.post(path, content=body, headers=headers)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        assert client.submitted == []
        assert await answers_normally(http)
    error = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert len(error["message"]) < 5000
    return error


async def refused_field(name: str, value: object, param: str | None = None) -> Any:
    error = await refused(json.dumps({"messages": QUESTION, name: value}))
    assert error["param"] == (param or name)
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', '"0.5"', "true", "[]", "{}"])
@pytest.mark.parametrize("name", FLOAT_FIELDS)
async def test_float_fields_refuse_what_is_no_finite_number(name: str, literal: str) -> None:
    await refused(f'{{{MESSAGES}, "{name}": {literal}}}')


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "1.5", '"5"', "true", "[]", "{}"])
@pytest.mark.parametrize("name", INT_FIELDS)
async def test_integer_fields_refuse_what_is_no_integer(name: str, literal: str) -> None:
    await refused(f'{{{MESSAGES}, "{name}": {literal}}}')


@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
@pytest.mark.parametrize("name", BOOL_FIELDS)
async def test_switches_refuse_what_is_not_true_or_false(name: str, value: object) -> None:
    error = await refused_field(name, value)
    assert "true or false" in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101),
        ("top_p", 1.1),
        ("min_p", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", 10**9),
        ("max_tokens", 10**4000),
        ("min_tokens", -1),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["x" * 1001]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(300))),
        ("priority", "urgent"),
        ("priority", 3),
        ("priority", True),
        ("model", 5),
        ("stream_options", "all"),
        ("n", "2"),
        ("n", True),
        ("logprobs", 1),
        ("top_logprobs", 10**9),
        ("top_logprobs", -1),
        ("top_logprobs", 3),
        ("logit_bias", []),
        ("logit_bias", {"abc": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"٣": 5}),
        ("logit_bias", {"1114112": 5}),
        ("logit_bias", {"50256": "5"}),
        ("logit_bias", {"50256": True}),
        ("logit_bias", {"50256": 10**400}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("stop_token_ids", [1_114_112]),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"tokenize": True}),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_values_out_of_range_name_their_field(name: str, value: object) -> None:
    error = await refused_field(name, value)
    assert name in error["message"]


async def test_the_place_inside_a_list_is_named() -> None:
    error = await refused_field("stop_token_ids", [1, "2"], "stop_token_ids[1]")
    assert error["message"] == "stop_token_ids[1] must be an integer, found '2'."
    await refused_field("stream_options", {"include_usage": 1}, "stream_options.include_usage")


async def test_more_minimum_than_maximum_is_refused() -> None:
    error = await refused(json.dumps({"messages": QUESTION, "min_tokens": 9, "max_tokens": 3}))
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 17),
        ("n", 5_000_000),
        ("n", 0),
        ("best_of", 3),
        ("prompt_logprobs", 1),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "text"),
        ("guided_regex", "("),
        ("grammar", "root ::= x"),
        ("chat_template", "{{ messages }}"),
        ("suffix", "end"),
        ("echo", True),
        ("typical_p", 0.5),
        ("modalities", ["text", "audio"]),
        ("add_generation_prompt", False),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_what_is_not_served_is_refused_rather_than_ignored(name: str, value: object) -> None:
    error = await refused_field(name, value)
    assert error["code"] == "unsupported_value"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ({}, "messages"),
        (["Hi"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([*QUESTION, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": {"type": "text", "text": "Hi"}}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "Hi"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "Hi", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": None}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "Hi"}] * 10_001, "messages"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_malformed_messages_name_the_place(messages: object, param: str) -> None:
    error = await refused(json.dumps({"messages": messages}))
    assert error["param"] == param


async def test_missing_messages_are_told() -> None:
    error = await refused("{}")
    assert (error["param"], error["message"]) == ("messages", "messages is missing: it is required.")
    assert (await refused('{"messages": null}'))["param"] == "messages"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "1"}},
        {"type": "hologram"},
    ],
    ids=lambda part: part["type"],
)
async def test_parts_that_are_no_text_are_refused_naming_the_model(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    error = await refused(json.dumps({"messages": messages}))
    assert error["code"] == "unsupported_value"
    assert "the model fake/model-4bit reads text only" in error["message"]


async def test_an_image_to_a_model_that_sees_is_told_that_this_is_its_text_part() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with in_process(FakeEngineClient(is_text_part=True)) as http:
        response = await http.post(CHAT, json={"messages": [{"role": "user", "content": [image]}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert "of the model fake/model-4bit only the text part is served: send parts of type text" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
async def test_continuing_needs_an_assistant_message_and_no_new_turn(fields: dict[str, bool]) -> None:
    error = await refused(json.dumps({"messages": QUESTION} | fields))
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b"[]",
        b'"text"',
        b"5",
        b"null",
        b'{"messages": [}',
        b'{"messages": "\xff"}',
        b'{"messages": "\\ud800"}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"a": ' + b'{"b":' * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_bodies_that_are_no_json_object_are_refused(body: bytes, path: str) -> None:
    error = await refused(body, path=path)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "headers", [{"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}, {}], ids=repr
)
async def test_other_content_types_are_told_what_to_send(headers: dict[str, str]) -> None:
    error = await refused(f"{{{MESSAGES}}}", 415, headers)
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("declared", [True, False])
async def test_too_large_bodies_are_413(declared: bool) -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 1024

    client = FakeEngineClient()
    async with in_process(client, max_body_bytes=16384) as http:
        content = b"x" * 40_960 if declared else pieces()
        response = await http.post(CHAT, content=content, headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert await answers_normally(http)


async def test_a_huge_message_is_refused_fast() -> None:
    client = FakeEngineClient()
    async with in_process(client) as http:
        started = time.monotonic()
        response = await http.post(CHAT, content=b'{"messages":"' + b"x" * (64 << 20), headers=JSON)
        assert response.status_code == 413
        assert time.monotonic() - started < 2
        assert (await http.get("/health")).status_code == 200
        assert await answers_normally(http)


@pytest.mark.parametrize("media", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
async def test_json_content_types_are_taken(media: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.post(CHAT, content=f"{{{MESSAGES}}}", headers={"content-type": media})
    assert response.status_code == 200
