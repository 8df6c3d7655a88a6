"""Answers in the words of the OpenAI protocol: usage, finish reasons, the text of streams read to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from appliance.client import FinishReason, RequestOutput, RequestStream, Usage
from appliance.errors import EngineDeadError
from appliance.server.disconnect import run_while_connected
from appliance.server.errors import RequestFailedError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer."""

    text: str
    last: RequestOutput
    """Carries the usage and why it ended."""


def finish_reason(output: RequestOutput) -> str:
    """`stop` or `length`. Raises RequestFailedError for a request that the engine ended without an answer."""
    if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        return output.finish_reason.value
    raise RequestFailedError("The engine ended this request before it was answered; send it again.")


def usage_content(usages: Sequence[Usage]) -> dict[str, Any]:
    """The `usage` object, summed over the choices of one request."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def read_answers(streams: Sequence[RequestStream], receive: Receive) -> list[Answer]:
    """Read all streams to their end, in one order; all are closed, however this returns.

    Raises ClientGoneError if the client disconnects, RequestFailedError, EngineDeadError.
    """
    try:
        return await run_while_connected(together([_read(stream) for stream in streams]), receive)
    finally:
        for stream in streams:
            await stream.aclose()


async def together(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all, cancel the rest when one fails, and raise what it raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _read(stream: RequestStream) -> Answer:
    texts = []
    async for output in stream:
        texts.append(output.text)
        if output.finish_reason is not None:
            finish_reason(output)
            return Answer("".join(texts), output)
    raise EngineDeadError("The engine ended the answer without a reason; send the request again.")
