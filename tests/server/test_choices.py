"""Several answers to one prompt, the prompt echoed, log probabilities: both endpoints, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.client import FinishReason
from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, answers_normally, events, in_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def post(client: FakeEngineClient, path: str, **fields: Any) -> Any:
    body = ({"messages": QUESTION} if path == CHAT else {"prompt": "Say"}) | fields
    async with in_process(client) as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return events(response.text) if fields.get("stream") else response.json()


def text_of(choice: Any) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_n_answers_have_n_indices_and_one_prompt_in_the_usage(path: str) -> None:
    client = FakeEngineClient([["a"], ["b", "b"], ["c"]])
    client.cached_tokens = 2
    answer = await post(client, path, n=3, best_of=3, seed=5)
    assert [(choice["index"], text_of(choice)) for choice in answer["choices"]] == [(0, "a"), (1, "bb"), (2, "c")]
    assert [request.child_index for request in client.submitted] == [0, 1, 2]
    assert {request.params.seed for request in client.submitted} == {5}
    assert len({request.request_id for request in client.submitted}) == 3
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(client.submitted[0].prompt), 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_a_batch_with_n_counts_choices_prompt_by_prompt() -> None:
    client = FakeEngineClient([["a"], ["b"], ["c"], ["d"]])
    answer = await post(client, COMPLETIONS, prompt=["one", "three"], n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [*enumerate("abcd")]
    assert [(request.prompt, request.child_index) for request in client.submitted] == [
        ("one", 0),
        ("one", 1),
        ("three", 0),
        ("three", 1),
    ]
    assert answer["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_n_answers_stream_side_by_side(path: str) -> None:
    client = FakeEngineClient([["a", "b"], ["x", "y", "z"]], delay=0.01)
    *chunks, last = await post(client, path, n=2, stream=True, stream_options={"include_usage": True})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    for index, text in enumerate(["ab", "xyz"]):
        mine = [choice for choice in choices if choice["index"] == index]
        told = (choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "") for choice in mine)
        assert "".join(told) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens"] == len(client.submitted[0].prompt)


async def test_too_many_choices_are_refused_at_once() -> None:
    client = FakeEngineClient()
    async with in_process(client) as http:
        response = await http.post(COMPLETIONS, json={"prompt": ["a"] * 17, "n": 16})
        assert response.status_code == 400
        assert "at most 16 prompts with n 16, found 17" in response.json()["error"]["message"]
        assert client.submitted == []
        assert await answers_normally(http)


async def test_children_refused_halfway_leave_nothing_behind() -> None:
    client = FakeEngineClient(max_requests=2)
    async with in_process(client) as http:
        assert (await http.post(CHAT, json={"messages": QUESTION, "n": 3})).status_code == 429
        assert client.running == {}
        assert len(client.aborted) == 2
        assert await answers_normally(http)


async def test_chat_tells_log_probabilities_of_every_token() -> None:
    client = FakeEngineClient([["Hi", " 🙂"]])
    answer = await post(client, CHAT, logprobs=True, top_logprobs=2)
    assert client.submitted[0].params.logprobs == 2
    assert client.submitted[0].params.prompt_logprobs is None
    likeliest = [
        {"token": "!", "logprob": 0.0, "bytes": [33]},
        {"token": "a", "logprob": -9999.0, "bytes": [97]},
    ]
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {"token": "Hi", "logprob": -0.125, "bytes": [72, 105], "top_logprobs": likeliest},
            {"token": " 🙂", "logprob": -0.25, "bytes": [32, 240, 159, 153, 130], "top_logprobs": likeliest},
        ],
        "refusal": None,
    }


async def test_chat_without_top_logprobs_tells_the_tokens_own() -> None:
    answer = await post(FakeEngineClient([["Hi"]]), CHAT, logprobs=True)
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"]) == ("Hi", [])
    plain = await post(FakeEngineClient([["Hi"]]), CHAT, logprobs=False, top_logprobs=0)
    assert plain["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_tells_the_same_log_probabilities_as_a_whole_answer(path: str) -> None:
    """Of tokens without text too, such as the one that ends an answer."""
    deltas, fields = [["", "He", "", "llo", ""]], {"logprobs": True if path == CHAT else 3, "n": 2}
    whole = await post(FakeEngineClient(deltas), path, **fields)
    chunks = await post(FakeEngineClient(deltas), path, stream=True, **fields)
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        expected = whole["choices"][index]["logprobs"]
        told = [choice["logprobs"] for choice in mine if choice["logprobs"] is not None]
        assert len(told) == 5
        for key in expected.keys() - {"refusal"}:
            assert [entry for part in told for entry in part[key]] == expected[key]
            assert len(expected[key]) == 5
        assert mine[-1]["logprobs"] is None


async def test_completions_tell_parallel_lists() -> None:
    answer = await post(FakeEngineClient([["He", "🙂", "!"]]), COMPLETIONS, logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["He", "🙂", "!"],
        "token_logprobs": [-0.125, -0.25, -0.375],
        "top_logprobs": [{"!": 0.0, "He": -0.125}, {"!": 0.0, "🙂": -0.25}, {"!": 0.0}],
        "text_offset": [0, 2, 3],
    }
    none = await post(FakeEngineClient([["He"]]), COMPLETIONS, logprobs=0)
    assert none["choices"][0]["logprobs"]["top_logprobs"] == [{"He": -0.125}]


@pytest.mark.parametrize("prompt", ["Say", [83, 97, 121], ["Say", "Say"], [[83, 97, 121]] * 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_any_form_of_prompt_is_echoed(prompt: Any, stream: bool) -> None:
    client = FakeEngineClient([["Hi", "!"]])
    count = 2 if isinstance(prompt[0], list | str) and len(prompt) == 2 else 1
    answer = await post(client, COMPLETIONS, prompt=prompt, echo=True, n=2, stream=stream)
    if stream:
        chunks = [chunk["choices"][0] for chunk in answer]
        indices = range(2 * count)
        texts = ["".join(choice["text"] for choice in chunks if choice["index"] == index) for index in indices]
    else:
        texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["SayHi!"] * 2 * count
    assert client.submitted[0].params.prompt_logprobs is None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_what_lm_eval_asks_is_answered(max_tokens: int, stream: bool) -> None:
    prompts = [[ord(c) for c in "first"], [ord(c) for c in "second one"]]
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 1234, "temperature": 0, "stream": stream}
    client = FakeEngineClient([["X"]], finish_reason=FinishReason.LENGTH)
    answer = await post(client, COMPLETIONS, prompt=prompts, **body)
    choices = answer["choices"] if not stream else [merged(answer, index) for index in range(2)]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, prompt in zip(choices, ["first", "second one"], strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == prompt + "X" * max_tokens
        assert logprobs["tokens"] == list(prompt) + ["X"] * max_tokens
        places = list(range(2, len(prompt) + 1))
        assert logprobs["token_logprobs"] == [None] + [-k / 8 for k in places] + [-0.125] * max_tokens
        assert logprobs["top_logprobs"][0] is None
        assert all(max(top.values()) == top["!"] == 0.0 for top in logprobs["top_logprobs"][1:])
        assert logprobs["text_offset"] == list(range(len(prompt) + max_tokens))
        assert choice["finish_reason"] == "length"
    if not stream:
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    params = client.submitted[0].params
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (max_tokens, 1, 1)


def merged(chunks: list[Any], index: int) -> Any:
    mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
    parts = [choice["logprobs"] for choice in mine if choice["logprobs"] is not None]
    return {
        "index": index,
        "text": "".join(choice["text"] for choice in mine),
        "logprobs": {key: [entry for part in parts for entry in part[key]] for key in parts[0]},
        "finish_reason": mine[-1]["finish_reason"],
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_of_one_token_is_told_too(stream: bool) -> None:
    client = FakeEngineClient()
    answer = await post(client, COMPLETIONS, prompt="S", echo=True, logprobs=1, max_tokens=0, stream=stream)
    choice = merged(answer, 0) if stream else answer["choices"][0]
    assert choice["text"] == "S"
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]) == (["S"], [None])


async def test_no_tokens_without_log_probabilities_give_the_prompt_back() -> None:
    client = FakeEngineClient()
    answer = await post(client, COMPLETIONS, echo=True, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("Say", None)


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 0}, {"max_tokens": 0, "logprobs": 1}, {"logprobs": 21}, {"logprobs": True}, {"echo": 1}]
)
async def test_wishes_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    client = FakeEngineClient()
    async with in_process(client) as http:
        response = await http.post(COMPLETIONS, json={"prompt": "Say", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))
        assert client.submitted == []
        assert await answers_normally(http)


async def test_a_bias_reaches_the_engine() -> None:
    client = FakeEngineClient()
    await post(client, CHAT, logit_bias={"50256": -100, "7": 2.5})
    assert client.submitted[0].params.logit_bias == ((50256, -100), (7, 2.5))
    await post(client, CHAT, logit_bias={})
    assert client.submitted[1].params.logit_bias == ()
