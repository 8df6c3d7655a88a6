"""Answers in the words of the OpenAI protocol: choices, usage, finish reasons, streams read to their end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from appliance.client import EngineClient, FinishReason, Priority, RequestOutput, RequestStream, Usage
from appliance.errors import EngineDeadError
from appliance.sampling_params import SamplingParams
from appliance.server.disconnect import run_while_connected
from appliance.server.errors import RequestFailedError

Result = TypeVar("Result")


async def submit_choices(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    n: int,
    priority: Priority,
    answer_id: str,
    param: str,
) -> list[RequestStream]:
    """n answers to each prompt, those to one prompt side by side. If one is refused, none is left running.

    Raises what `EngineClient.submit` raises.
    """
    choices = list(itertools.product(prompts, range(n)))
    # All at once: the engine looks into its inbox between steps, and each of them would wait for a step of its own.
    submissions = [
        asyncio.create_task(
            client.submit(
                tokens,
                params,
                priority=priority,
                request_id=answer_id if len(choices) == 1 else f"{answer_id}-{index}",
                param=param,
                child_index=child_index,
            )
        )
        for index, (tokens, child_index) in enumerate(choices)
    ]
    try:
        return await asyncio.gather(*submissions)
    except BaseException:
        for submission in submissions:
            submission.cancel()
        for outcome in await asyncio.gather(*submissions, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                await outcome.aclose()
        raise


def finish_reason(output: RequestOutput) -> str:
    """`stop` or `length`. Raises RequestFailedError for a request that the engine ended without an answer."""
    if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        return output.finish_reason.value
    raise RequestFailedError(output.error or "The engine ended this request before it was answered; send it again.")


def usage_content(usages: Sequence[Usage], n: int = 1) -> dict[str, Any]:
    """The `usage` object, summed over the choices of one request. Each n of them share a prompt, which counts once."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::n])},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def read_answers(streams: Sequence[RequestStream], receive: Receive) -> list[RequestOutput]:
    """Read all streams to their end: each whole answer as one output, in their order. All are closed in any case.

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


async def _read(stream: RequestStream) -> RequestOutput:
    outputs = []
    async for output in stream:
        outputs.append(output)
        if output.finish_reason is not None:
            finish_reason(output)
            return _joined(outputs)
    raise EngineDeadError("The engine ended the answer without a reason; send the request again.")


def _joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    return dataclasses.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(itertools.chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=tuple(itertools.chain.from_iterable(output.logprobs for output in outputs)),
        prompt_logprobs=tuple(itertools.chain.from_iterable(output.prompt_logprobs for output in outputs)),
    )
