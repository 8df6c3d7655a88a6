from __future__ import annotations

import asyncio
import html
import itertools
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from appliance.client import EngineState, FinishReason, Priority, RequestStream
from appliance.errors import ApplianceError, ContextLengthError, EngineLoadingError, QueueFullError
from appliance.ui import chat as chat_module
from appliance.ui.answer import NOTE
from appliance.ui.chat import (
    Chat,
    ChatSettings,
    Message,
    default_settings,
    edited_turn,
    message_text,
    prompt_messages,
    split_last_turn,
    user_message,
)
from tests.fake_client import FakeEngineClient

SETTINGS = ChatSettings()


@pytest.fixture(autouse=True)
def _quick_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATE_SECONDS", 0.005)


async def ask(
    chat: Chat, text: str, history: list[Message] | None = None, settings: ChatSettings = SETTINGS, session: str = "tab"
) -> list[list[Message]]:
    """Every update of one turn."""
    turn = chat.reply([*(history or []), user_message(text)], settings, session)
    return [update async for update in turn]


def note(shown: Message) -> str:
    """The text of the note under an answer."""
    notes = [part["text"] for part in shown["content"] if part["text"].startswith(NOTE)]
    assert len(notes) == 1
    return html.unescape(notes[0])


def assert_idle(client: FakeEngineClient) -> None:
    assert not client.running
    assert client.free_blocks == client.info.num_kv_blocks


async def test_the_answer_grows_and_ends_whole() -> None:
    client = FakeEngineClient([list("The answer is 42.")], delay=0.01)
    updates = await ask(Chat(client), "What?")
    texts = [message_text(update[-1]) for update in updates]
    assert texts[0] == ""
    assert texts[-1] == "The answer is 42."
    assert len(set(texts)) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [message["role"] for message in updates[-1]] == ["user", "assistant"]
    assert_idle(client)


async def test_updates_come_no_faster_than_the_page_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATE_SECONDS", 0.1)
    client = FakeEngineClient([["x"] * 200], delay=0.001)
    assert len(await ask(Chat(client), "go")) <= 8


async def test_the_note_tells_tokens_rate_and_time_to_first_token() -> None:
    client = FakeEngineClient([["a", "b", "c"]], delay=0.01)
    client.cached_tokens = 16
    updates = await ask(Chat(client), "What?")
    for fact in ("3 tokens", "tokens/s", "first token after 0.0", "(16 cached)"):
        assert fact in note(updates[-1][-1])


async def test_an_answer_cut_at_the_limit_says_so() -> None:
    client = FakeEngineClient([["a", "b", "c"]], finish_reason=FinishReason.STOP)
    updates = await ask(Chat(client), "What?", settings=ChatSettings(max_tokens=2))
    assert message_text(updates[-1][-1]) == "ab"
    assert "cut at the token limit" in note(updates[-1][-1])


async def test_controls_and_model_defaults_reach_the_engine() -> None:
    client = FakeEngineClient(default_sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20})
    defaults = default_settings(client.info.default_sampling)
    assert defaults.temperature == 0.6
    settings = replace(defaults, system_prompt="Be brief.", temperature=0.3, seed=-5, max_tokens=7)
    await ask(Chat(client), "Hi", settings=settings)
    request = client.submitted[0]
    assert request.priority is Priority.INTERACTIVE
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.9, 20, 7)
    assert (params.seed, params.min_p, params.repetition_penalty) == (-5, 0.0, 1.0)
    assert client.messages[0] == {"role": "system", "content": "Be brief."}


async def test_stop_aborts_frees_the_blocks_and_keeps_the_text() -> None:
    client = FakeEngineClient([["word "] * 1000, ["again"]], delay=0.005)
    chat = Chat(client)
    history: list[Message] = []
    async for history in chat.reply([user_message("Talk")], SETTINGS, "tab"):
        if len(message_text(history[-1])) >= 10:
            chat.stop("tab")
    assert client.aborted == [client.submitted[0].request_id]
    assert_idle(client)
    kept = message_text(history[-1])
    assert 10 <= len(kept) < 1000
    assert "stopped" in note(history[-1])

    await ask(chat, "Go on", history)
    assert client.messages == [
        {"role": "user", "content": "Talk"},
        {"role": "assistant", "content": kept},
        {"role": "user", "content": "Go on"},
    ]


async def test_stop_works_while_the_request_waits_for_its_first_token() -> None:
    client = FakeEngineClient()
    client.gate.clear()
    chat = Chat(client)
    turn = asyncio.create_task(ask(chat, "Hi"))
    while not client.running:
        await asyncio.sleep(0.001)
    chat.stop("tab")
    updates = await asyncio.wait_for(turn, 2)
    assert "stopped" in note(updates[-1][-1])
    assert_idle(client)


async def test_leaving_the_page_aborts() -> None:
    client = FakeEngineClient([["word "] * 1000], delay=0.005)
    async with aclosing(Chat(client).reply([user_message("Talk")], SETTINGS, "tab")) as turn:
        async for history in turn:
            if message_text(history[-1]):
                break
    assert len(client.aborted) == 1
    assert_idle(client)


async def test_cancelling_the_turn_aborts() -> None:
    client = FakeEngineClient()
    client.gate.clear()
    turn = asyncio.create_task(ask(Chat(client), "Hi"))
    while not client.running:
        await asyncio.sleep(0.001)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert len(client.aborted) == 1
    assert_idle(client)


async def test_a_waiting_request_still_makes_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio notices a page that has gone only when an update is made."""
    monkeypatch.setattr(chat_module, "HEARTBEAT_SECONDS", 0.02)
    client = FakeEngineClient()
    client.gate.clear()
    async with aclosing(Chat(client).reply([user_message("Hi")], SETTINGS, "tab")) as turn:
        async with asyncio.timeout(2):
            for _ in range(4):
                await anext(turn)
    assert_idle(client)


async def test_clearing_the_chat_ends_the_answer_and_leaves_it_empty() -> None:
    client = FakeEngineClient([["word "] * 1000], delay=0.005)
    chat = Chat(client)
    updates = []
    async for update in chat.reply([user_message("Talk")], SETTINGS, "tab"):
        updates.append(update)
        chat.stop("tab", discard=True)
    assert updates[-1] == []
    assert_idle(client)


async def test_ten_pages_are_answered_together() -> None:
    client = FakeEngineClient([list("answer")])
    client.gate.clear()
    chat = Chat(client)
    turns = [asyncio.create_task(ask(chat, f"question {i}", session=f"tab {i}")) for i in range(10)]
    async with asyncio.timeout(2):
        while len(client.running) < 10:
            await asyncio.sleep(0.001)
    client.gate.set()
    for i, updates in enumerate(await asyncio.gather(*turns)):
        assert message_text(updates[-1][0]) == f"question {i}"
        assert message_text(updates[-1][-1]) == "answer"
    assert_idle(client)


async def test_a_new_question_ends_the_pages_old_answer() -> None:
    client = FakeEngineClient([["old "] * 1000, ["new"]], delay=0.005)
    chat = Chat(client)
    first = asyncio.create_task(ask(chat, "one"))
    while client.generated < 3:
        await asyncio.sleep(0.001)
    updates = await ask(chat, "two")
    replaced = await asyncio.wait_for(first, 2)
    assert "stopped" not in str(replaced[-1]), "it would be shown over the new answer"
    assert message_text(updates[-1][-1]) == "new"
    assert len(client.aborted) == 1
    assert_idle(client)


@pytest.mark.parametrize(
    "error",
    [
        EngineLoadingError("The model is still being loaded; try again in a moment."),
        ContextLengthError(5000, 0, 4096),
        QueueFullError("Too many requests wait; try again in a moment."),
    ],
)
async def test_a_refusal_is_shown_and_the_next_message_works(error: ApplianceError) -> None:
    client = FakeEngineClient()
    client.refuse_with = error
    chat = Chat(client)
    history = (await ask(chat, "One"))[-1]
    assert error.message in note(history[-1])
    client.refuse_with = None
    history = (await ask(chat, "Two", history))[-1]
    assert message_text(history[-1]) == "Hello, world!"
    assert client.messages == [{"role": "user", "content": "One\n\nTwo"}]


async def test_an_engine_that_dies_leaves_text_and_message() -> None:
    client = FakeEngineClient(fail_after=2)
    chat = Chat(client)
    history = (await ask(chat, "One"))[-1]
    assert message_text(history[-1]) == "Hello,"
    assert "engine process ended" in note(history[-1])
    assert_idle(client)


async def test_the_cause_of_an_answer_that_the_engine_gave_up_is_shown() -> None:
    client = FakeEngineClient([["Hel", "lo"]], finish_reason=FinishReason.ERROR, error="The scores are NaN.")
    history = (await ask(Chat(client), "One"))[-1]
    assert message_text(history[-1]) == "Hello"
    assert "The scores are NaN." in note(history[-1])


async def test_a_model_still_loading_is_said() -> None:
    client = FakeEngineClient(state=EngineState.LOADING)
    history = (await ask(Chat(client), "One"))[-1]
    assert "still being loaded" in note(history[-1])


async def test_a_control_out_of_range_is_said() -> None:
    history = (await ask(Chat(FakeEngineClient()), "One", settings=ChatSettings(max_tokens=-5)))[-1]
    assert "max_tokens must be" in note(history[-1])


async def test_a_fault_of_ours_is_logged_and_the_page_stays_usable(caplog: pytest.LogCaptureFixture) -> None:
    def broken(stream: RequestStream) -> RequestStream:
        raise RuntimeError("secret path")

    client = FakeEngineClient()
    history = (await ask(Chat(client, broken), "One"))[-1]
    assert "secret path" not in note(history[-1])
    assert "secret path" in caplog.text
    assert_idle(client)


async def test_each_stream_is_shown_to_the_observer() -> None:
    seen: list[str] = []

    def observe(stream: RequestStream) -> RequestStream:
        seen.append(stream.request_id)
        return stream

    client = FakeEngineClient()
    await ask(Chat(client, observe), "Hi")
    assert seen == [client.submitted[0].request_id]


async def test_angle_brackets_reach_the_model_as_written() -> None:
    client = FakeEngineClient([["<think>why</think>", "#include <stdio.h>"]])
    chat = Chat(client)
    history = (await ask(chat, "What is <img src=x>?"))[-1]
    await ask(chat, "And?", history)
    assert [message["content"] for message in client.messages] == [
        "What is <img src=x>?",
        "<think>why</think>#include <stdio.h>",
        "And?",
    ]


def test_retry_starts_from_the_last_question() -> None:
    history = [user_message("a"), answer("b"), user_message("c <d>"), answer("e")]
    before, text = split_last_turn(history)
    assert before == history[:2]
    assert text == "c <d>"
    assert split_last_turn([]) == ([], "")


def test_an_edited_message_ends_the_history() -> None:
    history = [user_message("a"), answer("b"), user_message("c <d>"), answer("e")]
    assert edited_turn(history, 2, "f <g>") == [*history[:2], user_message("f <g>")]


def test_what_a_model_suggests_is_what_the_panel_can_show() -> None:
    """top_k -1 is another word for off."""
    suggested = {"temperature": 0.0, "top_k": -1.0, "min_p": 0.1, "repetition_penalty": 1.1}
    settings = default_settings(suggested)
    assert settings == ChatSettings(temperature=0.0, top_k=0, min_p=0.1, repetition_penalty=1.1)
    assert settings.params().is_greedy


def test_an_empty_system_prompt_is_not_sent() -> None:
    assert prompt_messages([user_message("a")], " \n") == [{"role": "user", "content": "a"}]


def answer(text: str) -> Message:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}, {"type": "text", "text": f'{NOTE}">1 token</div>'}]
    return {"role": "assistant", "content": content}
