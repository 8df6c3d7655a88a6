"""POST /v1/chat/completions without streaming: what reaches the engine, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.client import EngineState, FinishReason, Priority
from appliance.errors import CapacityError, QueueFullError
from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, answers_normally, in_process

CHAT = "/v1/chat/completions"


async def ask(client: FakeEngineClient, **fields: Any) -> Any:
    """The JSON of an answer that must succeed."""
    async with in_process(client) as http:
        response = await http.post(CHAT, json={"messages": QUESTION} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_answer_has_the_form_of_the_protocol() -> None:
    client = FakeEngineClient()
    answer = await ask(client, model="fake/model-4bit")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake/model-4bit"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    prompt = len("<user>Hi\n<assistant>")
    assert answer["usage"]["prompt_tokens"] == prompt
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["total_tokens"] == prompt + 4
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("path", ["/chat/completions", "/v1//chat/completions", "//v1/chat/completions/"])
async def test_other_spellings_of_the_path_answer_too(path: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.post(f"http://127.0.0.1{path}", json={"messages": QUESTION})
    assert response.status_code == 200


async def test_messages_reach_the_template_as_roles_and_strings() -> None:
    client = FakeEngineClient()
    await ask(
        client,
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be "}, {"type": "input_text", "text": "brief."}],
            },
            {"role": "user", "content": "Weather?", "name": "Ada", "unknown": 1},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
                    {"id": None, "type": "function", "function": {"name": "broken", "arguments": "{"}},
                ],
            },
            {"role": "function", "content": "sunny"},
            {"role": "assistant"},
            {
                "role": "user",
                "content": ["a", {"type": "refusal", "refusal": "b"}, {"type": "output_text", "text": "c"}],
            },
        ],
    )
    assert client.messages[0] == {"role": "system", "content": "Be brief."}
    assert client.messages[1] == {"role": "user", "content": "Weather?", "name": "Ada"}
    calls = client.messages[2]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Rome"}, "{"]
    assert client.messages[3] == {"role": "tool", "content": "sunny"}
    assert client.messages[4] == {"role": "assistant", "content": ""}
    assert client.messages[5]["content"] == "abc"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
        ({"n_predict": 6}, 6),
        ({"max_new_tokens": 6}, 6),
        ({"max_length": 6}, 6),
        ({"max_tokens": None, "n_predict": 6}, 6),
    ],
)
async def test_length_limit_is_found_under_all_its_names(fields: dict[str, Any], expected: int | None) -> None:
    client = FakeEngineClient()
    await ask(client, **fields)
    assert client.submitted[0].params.max_tokens == expected


async def test_sampling_fields_and_their_aliases_reach_the_engine() -> None:
    client = FakeEngineClient()
    await ask(
        client,
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=-1,
        frequency_penalty=1.5,
        rep_pen=1.1,
        min_length=2,
        stop_token_ids=[3, 4],
        ban_eos_token=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        priority="batch",
        seed=-1,
    )
    request = client.submitted[0]
    params = request.params
    assert request.priority is Priority.BATCH
    assert request.param == "messages"
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.9, 40, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1, 1.5, 1.1)
    assert (params.min_tokens, params.stop_token_ids, params.ignore_eos) == (2, (3, 4), True)
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert params.seed == 2**64 - 1


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (2**63, 2**63), (2**70 + 5, 5), (-(2**64), 0)])
async def test_any_integer_is_a_seed(seed: int, expected: int) -> None:
    client = FakeEngineClient()
    await ask(client, seed=seed)
    assert client.submitted[0].params.seed == expected


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ("", ()), ([], ()), ("END", ("END",)), (["a", "", "b"], ("a", "b"))]
)
async def test_stop_takes_a_string_or_a_list(stop: object, expected: tuple[str, ...]) -> None:
    client = FakeEngineClient()
    await ask(client, stop=stop)
    assert client.submitted[0].params.stop == expected


async def test_the_models_defaults_hold_where_the_client_is_silent() -> None:
    client = FakeEngineClient(default_sampling={"temperature": 0.6, "top_k": 20.0, "unknown": 3.0})
    await ask(client, temperature=0.1, top_p=None)
    params = client.submitted[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.1, 20, 1.0)


async def test_unknown_and_neutral_fields_are_accepted() -> None:
    neutral = {
        "user": "me",
        "store": True,
        "metadata": {"a": [1]},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "typical_p": 1.0,
        "chat_template": None,
    }
    await ask(FakeEngineClient(), **neutral)
    await ask(FakeEngineClient(), tools=[{"type": "function"}], tool_choice="none")


async def test_final_message_is_continued_on_request() -> None:
    client = FakeEngineClient()
    messages = [*QUESTION, {"role": "assistant", "content": "Once"}]
    await ask(client, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert client.template_kwargs == {"continue_final_message": True}
    await ask(client, chat_template_kwargs={"enable_thinking": False})
    assert client.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("model", ["fake/model-4bit", "default", "", None, "gpt-alias"])
async def test_known_names_of_the_model_are_answered(model: str | None) -> None:
    async with in_process(FakeEngineClient(), model_aliases=("gpt-alias",)) as http:
        response = await http.post(CHAT, json={"messages": QUESTION, "model": model})
    assert response.status_code == 200


async def test_unknown_model_is_404_and_lists_the_names() -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.post(CHAT, json={"messages": QUESTION, "model": "gpt-4"})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "fake/model-4bit" in error["message"]
        assert await answers_normally(http)


async def test_prompt_longer_than_the_context_is_told_in_the_text_that_clients_match() -> None:
    client = FakeEngineClient(max_model_len=64)
    async with in_process(client) as http:
        body = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 10}
        response = await http.post(CHAT, json=body)
        assert response.status_code == 400
        prompt = len("<user>\n<assistant>") + 100
        assert response.json()["error"] == {
            "message": f"This model's maximum context length is 64 tokens. However, you requested {prompt + 10} tokens "
            f"({prompt} in the prompt, 10 for the completion). prompt is too long: {prompt} tokens > 64 maximum. "
            "[context_length_exceeded]",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "n_prompt_tokens": prompt,
            "n_ctx": 64,
        }
        assert await answers_normally(http)


async def test_length_is_told_when_the_answer_is_cut() -> None:
    answer = await ask(FakeEngineClient(), max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "Hello,"


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.RESTARTING])
async def test_requests_during_a_load_are_503_with_retry_after(state: EngineState) -> None:
    client = FakeEngineClient(state=state)
    async with in_process(client) as http:
        response = await http.post(CHAT, json={"messages": QUESTION})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_loading"
        assert int(response.headers["retry-after"]) > 0
        client.state = EngineState.READY
        assert await answers_normally(http)


async def test_dead_engine_is_500_and_not_to_be_retried() -> None:
    async with in_process(FakeEngineClient(state=EngineState.FAILED)) as http:
        response = await http.post(CHAT, json={"messages": QUESTION})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_dead"
    assert response.headers["x-should-retry"] == "false"


async def test_refusals_of_the_engine_keep_their_status() -> None:
    client = FakeEngineClient()
    async with in_process(client) as http:
        client.refuse_with = QueueFullError("1024 requests wait already; try again later.")
        response = await http.post(CHAT, json={"messages": QUESTION})
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(response.headers["retry-after"]) > 0
        client.refuse_with = CapacityError("The prompt needs 10 blocks, the pool has 5.", param="messages")
        response = await http.post(CHAT, json={"messages": QUESTION})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "kv_capacity_exceeded")
        client.refuse_with = None
        assert await answers_normally(http)


async def test_engine_that_dies_in_mid_answer_is_a_500() -> None:
    client = FakeEngineClient(fail_after=2)
    async with in_process(client) as http:
        response = await http.post(CHAT, json={"messages": QUESTION})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
        client.fail_after = None
        assert await answers_normally(http)
    assert client.free_blocks == client.info.num_kv_blocks


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_request_that_the_engine_gave_up_is_a_500(reason: FinishReason) -> None:
    async with in_process(FakeEngineClient(finish_reason=reason)) as http:
        response = await http.post(CHAT, json={"messages": QUESTION})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": QUESTION}), ("/v1/completions", {"prompt": "Hi"})])
async def test_the_engines_cause_reaches_the_client(path: str, body: dict[str, Any]) -> None:
    client = FakeEngineClient(finish_reason=FinishReason.ERROR, error="The scores are NaN.")
    async with in_process(client) as http:
        response = await http.post(path, json=body)
    assert response.json()["error"]["message"] == "The scores are NaN."


async def test_model_without_a_template_is_a_clear_400_and_completes_text() -> None:
    async with in_process(FakeEngineClient(has_chat_template=False)) as http:
        response = await http.post(CHAT, json={"messages": QUESTION})
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200


async def test_unforeseen_failure_is_a_json_500_without_detail(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenClient(FakeEngineClient):
        async def encode_chat(self, *_: Any, **__: Any) -> list[int]:
            raise RuntimeError("secret detail")

    async with in_process(BrokenClient()) as http:
        response = await http.post(CHAT, json={"messages": QUESTION})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in caplog.text
