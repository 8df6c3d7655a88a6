"""Turns of the chat: histories in, growing histories out, engine requests in between. No Gradio in here.

A history is Gradio's list of messages; it lives in the browser page and nowhere else. What this module remembers is
which request each page has running, to stop it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.client import EngineClient, Priority, RequestStream
from appliance.errors import ApplianceError
from appliance.sampling_params import SamplingParams
from appliance.ui.answer import NOTE, WAITING, Answer, error_note
from appliance.ui.text import decode, encode

Message = dict[str, Any]
"""`role` and `content`, a list of {"type": "text", "text": ...}."""
Observe = Callable[[RequestStream], RequestStream]

UPDATE_SECONDS = 0.05
"""At most 20 updates a second: each one re-renders the message in the browser."""
HEARTBEAT_SECONDS = 1.0
"""Gradio looks whether the page is still there when an update is made, so a request that waits makes some too."""

DEFAULT_TEMPERATURE = 0.7
"""Of a model whose generation_config.json names none."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What the page's controls say. max_tokens None is the rest of the context."""

    system_prompt: str = ""
    temperature: float = DEFAULT_TEMPERATURE
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None

    def params(self) -> SamplingParams:
        """Raises InvalidRequestError for what is out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            max_tokens=self.max_tokens,
        )


def default_settings(suggested: Mapping[str, float]) -> ChatSettings:
    """The settings of a page that nobody has touched; `suggested` is `ModelInfo.default_sampling`."""
    settings = ChatSettings()
    known = {name: value for name, value in suggested.items() if hasattr(settings, name)}
    if "top_k" in known:
        known["top_k"] = max(0, int(known["top_k"]))
    return replace(settings, **known)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Run:
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    discard: bool = False


def message(role: str, *texts: str) -> Message:
    """A chat message whose texts, already encoded, are shown one below the other."""
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def user_message(text: str) -> Message:
    return message("user", encode(text))


def message_text(shown: Message) -> str:
    """What was written in a message, without the notes under it."""
    texts = (part["text"] for part in shown["content"] if part["type"] == "text")
    return "\n".join(decode(text) for text in texts if not text.startswith(NOTE))


def prompt_messages(history: Sequence[Message], system_prompt: str) -> list[dict[str, str]]:
    """The history as the engine takes it.

    An answer that failed before its first token leaves two turns of the user side by side; chat templates that insist
    on alternation refuse that, so they become one.
    """
    messages = [{"role": "system", "content": system_prompt}] if system_prompt.strip() else []
    for shown in history:
        role, text = shown["role"], message_text(shown)
        if not text:
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
    return messages


def edited_turn(history: Sequence[Message], index: int, text: str) -> list[Message]:
    """The history up to the user's message at `index`, which becomes `text`; what was said after it is gone."""
    return [*history[:index], user_message(text)]


def split_last_turn(history: Sequence[Message]) -> tuple[list[Message], str]:
    """The history before the last message of the user, and that message's text."""
    for index in range(len(history) - 1, -1, -1):
        if history[index]["role"] == "user":
            return list(history[:index]), message_text(history[index])
    return list(history), ""


class Chat:
    """Answers on one engine, any number of pages at a time, one request a page."""

    def __init__(self, client: EngineClient, observe: Observe | None = None) -> None:
        self._client = client
        self._observe = observe
        self._runs: dict[str, _Run] = {}

    def is_answering(self, session: str) -> bool:
        return session in self._runs

    def stop(self, session: str, *, discard: bool = False) -> None:
        """End the page's running answer; with `discard` the conversation too. Nothing running: nothing happens."""
        if run := self._runs.get(session):
            run.discard = run.discard or discard
            run.stop.set()

    async def reply(
        self, history: list[Message], settings: ChatSettings, session: str
    ) -> AsyncGenerator[list[Message]]:
        """Yield `history` with a growing answer; the last one has the whole text and a note on tokens and times.

        Whatever goes wrong ends up as a note in the chat. A turn that the page's next one replaces yields nothing more.
        Close this generator (`aclosing`) to leave it early: then the request has ended in the engine or is aborted.
        """
        self.stop(session)
        run = self._runs[session] = _Run()
        answer = Answer()
        try:
            yield [*history, message("assistant", WAITING)]
            messages = prompt_messages(history, settings.system_prompt)
            async with aclosing(self._stream(messages, settings, run, answer)) as texts:
                async for text in texts:
                    yield [*history, message("assistant", encode(text) or WAITING)]
            note = error_note(answer.error) if answer.error else answer.note()
        except ApplianceError as error:
            note = error_note(str(error))
        except Exception:
            # A fault of ours or of the template must leave the page usable; the log has the traceback.
            _logger.exception("a chat turn failed")
            note = error_note("This answer failed inside the appliance; its log says why. You can go on chatting.")
        finally:
            is_last = self._runs.get(session) is run
            if is_last:
                del self._runs[session]
        if not is_last:
            return
        shown = [encode(answer.text)] if answer.text else []
        yield [] if run.discard else [*history, message("assistant", *shown, note)]

    async def _stream(
        self, messages: list[dict[str, str]], settings: ChatSettings, run: _Run, answer: Answer
    ) -> AsyncGenerator[str]:
        """The text so far, again and again while it grows."""
        prompt = await self._client.encode_chat(messages)
        request = self._client.submit(prompt, settings.params(), priority=Priority.INTERACTIVE)
        async with aclosing(await request) as submitted:
            stream = self._observe(submitted) if self._observe is not None else submitted
            reader = asyncio.create_task(answer.read(stream))
            stopped = asyncio.create_task(run.stop.wait())
            try:
                seen, updated = 0, time.monotonic()
                while not reader.done() and not stopped.done():
                    await asyncio.wait((reader, stopped), timeout=UPDATE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if len(answer.parts) > seen or time.monotonic() - updated > HEARTBEAT_SECONDS:
                        seen, updated = len(answer.parts), time.monotonic()
                        yield answer.text
                if reader.done():
                    reader.result()
            finally:
                reader.cancel()
                stopped.cancel()
                await asyncio.gather(reader, stopped, return_exceptions=True)
                await stream.aclose()
