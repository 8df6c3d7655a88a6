"""POST /tokenize and /detokenize, as vLLM's and llama.cpp's users send them."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.client import EngineState
from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, in_process

BOS = 2


async def post(path: str, body: dict[str, Any], client: FakeEngineClient | None = None) -> Any:
    async with in_process(client or FakeEngineClient(has_bos=True)) as http:
        return await http.post(path, json=body)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/v1//tokenize/"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "default", "prompt": "Hi"}, [BOS, 72, 105]),
        ({"prompt": "Hi", "add_special_tokens": False}, [72, 105]),
        ({"content": "Hi"}, [72, 105]),
        ({"content": "Hi", "add_special": True}, [BOS, 72, 105]),
        ({"content": "", "with_pieces": False, "parse_special": True}, []),
        ({"messages": QUESTION}, [ord(c) for c in "<user>Hi\n<assistant>"]),
    ],
    ids=repr,
)
async def test_text_and_chats_become_tokens(path: str, body: dict[str, Any], expected: list[int]) -> None:
    response = await post(path, body)
    assert response.status_code == 200, response.text
    assert response.json() == {"tokens": expected, "count": len(expected), "max_model_len": 4096}


async def test_tokens_become_text_under_both_names() -> None:
    response = await post("/detokenize", {"tokens": [72, 105, 0x1F642]})
    assert response.json() == {"prompt": "Hi🙂", "content": "Hi🙂"}
    assert (await post("/v1/detokenize", {"tokens": []})).json()["content"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
    ids=repr,
)
async def test_wrong_bodies_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    response = await post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [65]})])
async def test_other_models_and_a_load_are_told(path: str, body: dict[str, Any]) -> None:
    assert (await post(path, body | {"model": "other"})).status_code == 404
    assert (await post(path, body, FakeEngineClient(state=EngineState.LOADING))).status_code == 503
