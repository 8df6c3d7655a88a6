"""The bytes of streamed answers: `data:` lines of JSON chunks and nothing else.

No `id:`, `event:`, `retry:` or comment lines: each of them breaks some client's parser (openai-python, home-llm,
Continue). What is the same in all chunks of an answer is made once, because a chunk is written for every token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.client import RequestOutput, Usage
from appliance.errors import ApplianceError
from appliance.server.answers import finish_reason, usage_content
from appliance.server.errors import error_content
from appliance.server.protocol import StreamOptions

DONE = b"data: [DONE]\n\n"

_quote = json.JSONEncoder(ensure_ascii=False).encode
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """How one endpoint's chunks say things inside a choice."""

    object: str
    opening: str
    empty: str
    before_text: str
    after_text: str


CHAT_CHUNK = ChunkForm(
    "chat.completion.chunk", '"delta":{"role":"assistant","content":""}', '"delta":{}', '"delta":{"content":', "}"
)
TEXT_CHUNK = ChunkForm("text_completion", '"text":""', '"text":""', '"text":', "")


def error_event(error: ApplianceError) -> bytes:
    """An error after the first byte; DONE follows it."""
    return _event(_compact(error_content(error)))


class ChunkWriter:
    """Writes the chunks of one answer of one or more choices. Strings that are no UTF-8 become `?`."""

    def __init__(
        self,
        form: ChunkForm,
        *,
        answer_id: str,
        created: int,
        model: str,
        choices: int,
        n: int,
        options: StreamOptions,
        echoes: Sequence[str] = (),
    ) -> None:
        """Each n of the choices share a prompt. `echoes`, one a choice, are text to begin with."""
        head = _compact({"id": answer_id, "object": form.object, "created": created, "model": model})
        self._form = form
        self._head = head[:-1] + ',"choices":['
        self._starts = [f'{self._head}{{"index":{index},' for index in range(choices)]
        self._n = n
        self._echoes = echoes
        self._usages = [Usage(0, 0)] * choices
        self._continuous = options.continuous_usage_stats
        self._include_usage = options.include_usage
        self._close = "]" + (',"usage":null' if options.include_usage else "") + "}"

    def opening(self, index: int) -> bytes:
        """The first chunk of a choice, sent before there is any text."""
        if self._echoes and self._echoes[index]:
            return self._chunk(index, self._said(self._echoes[index]))
        return self._chunk(index, self._form.opening)

    def idle(self, index: int) -> bytes:
        """A chunk that says nothing, to keep the connection alive."""
        return self._chunk(index, self._form.empty)

    def text(self, index: int, output: RequestOutput, logprobs: dict[str, Any] | None) -> bytes:
        """A text delta with its log probabilities; nothing where the output has neither."""
        self._usages[index] = output.usage
        if logprobs is not None:
            return self._chunk(index, self._said(output.text), logprobs=_compact(logprobs))
        if not output.text:
            return b""
        return self._chunk(index, self._said(output.text))

    def finish(self, index: int, output: RequestOutput) -> bytes:
        """The last chunk of a choice. Raises RequestFailedError if the engine gave the request up."""
        reason = f'"{finish_reason(output)}","stop_reason":{_quote(output.stop_reason)}'
        return self._chunk(index, self._form.empty, reason)

    def ending(self) -> bytes:
        """The usage chunk if it was asked for, and DONE."""
        if not self._include_usage:
            return DONE
        return _event(f'{self._head}],"usage":{self._usage(self._usages)}}}') + DONE

    def _said(self, text: str) -> str:
        return f"{self._form.before_text}{_quote(text)}{self._form.after_text}"

    def _chunk(self, index: int, said: str, reason: str = "null", logprobs: str = "null") -> bytes:
        close = f'],"usage":{self._usage(self._usages)}}}' if self._continuous else self._close
        return _event(f'{self._starts[index]}{said},"logprobs":{logprobs},"finish_reason":{reason}}}{close}')

    def _usage(self, usages: Sequence[Usage]) -> str:
        return _compact(usage_content(usages, self._n))


def _event(line: str) -> bytes:
    return f"data: {line}\n\n".encode("utf-8", "replace")
