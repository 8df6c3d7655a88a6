"""POST /v1/completions without streaming."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.server.completions import DEFAULT_MAX_TOKENS
from tests.fake_client import FakeEngineClient
from tests.server.support import answers_normally, in_process

COMPLETIONS = "/v1/completions"


async def complete(client: FakeEngineClient, **fields: Any) -> Any:
    async with in_process(client) as http:
        response = await http.post(COMPLETIONS, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_answer_has_the_form_of_the_protocol() -> None:
    client = FakeEngineClient()
    answer = await complete(client, prompt="Say")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["index"], choice["finish_reason"]) == ("Hello, world!", 0, "stop")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 4)
    assert client.submitted[0].prompt == "Say"
    assert client.submitted[0].param == "prompt"


@pytest.mark.parametrize(("asked", "expected"), [(None, DEFAULT_MAX_TOKENS), (-1, None), (3, 3)])
async def test_without_max_tokens_the_documented_default_holds(asked: int | None, expected: int | None) -> None:
    client = FakeEngineClient()
    await complete(client, prompt="Say", max_tokens=asked)
    assert client.submitted[0].params.max_tokens == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])],
)
async def test_all_forms_of_prompt_are_taken(prompt: object, expected: list[str]) -> None:
    client = FakeEngineClient([["first"], ["second"]])
    answer = await complete(client, prompt=prompt)
    assert [request.prompt for request in client.submitted] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert [choice["text"] for choice in answer["choices"]] == ["first", "second"][: len(expected)]


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], ["a", ""], [-1], [0x110000], [True], [1, "a"], [["a"]], [1.5], {"a": 1}, 5, ["a"] * 257],
    ids=repr,
)
async def test_bad_prompts_are_refused(prompt: object) -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.post(COMPLETIONS, json={"prompt": prompt})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert len(response.text) < 500
        assert await answers_normally(http)


@pytest.mark.parametrize("prompt", ["x" * 100, [5] * 100])
async def test_prompt_longer_than_the_context_blames_the_prompt(prompt: object) -> None:
    async with in_process(FakeEngineClient(max_model_len=64)) as http:
        response = await http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 4})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert "104 tokens (100 in the prompt, 4 for the completion)" in error["message"]
        assert await answers_normally(http)


async def test_a_batch_that_is_refused_halfway_leaves_nothing_behind() -> None:
    client = FakeEngineClient(max_requests=2)
    async with in_process(client) as http:
        response = await http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
        assert response.status_code == 429
        assert client.running == {}
        assert len(client.aborted) == 2
        assert await answers_normally(http)


async def test_a_batch_of_which_one_fails_closes_the_others() -> None:
    client = FakeEngineClient([["a"] * 50], fail_after=3)
    async with in_process(client) as http:
        response = await http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "max_tokens": 50})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
    assert client.running == {}
