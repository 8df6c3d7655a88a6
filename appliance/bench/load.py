"""Sends requests to an OpenAI-compatible server and records when each token of each answer came.

Closed loop: `concurrency` callers, each asks again as soon as it is answered. Open loop: requests fall due at random
(Poisson) times, whether or not earlier ones have been answered, and are timed from the moment they fell due, so that a
generator or a server that falls behind shows. Knows nothing of statistics.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httptools

from appliance.bench.http import Endpoint, parse_json, request, request_json
from appliance.bench.prompts import Range, prompt_and_length
from appliance.errors import ApplianceError, UsageError

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to send. One of `concurrency` and `rate` is set, and one of `num_requests` and `duration_s`."""

    model: str
    prompt_words: Range
    output_tokens: Range
    seed: int = 0
    concurrency: int | None = None
    rate: float | None = None
    """Requests a second."""
    num_requests: int | None = None
    duration_s: float | None = None
    """No request starts later; those under way are waited for."""
    warmup: int = 0
    """Requests sent beforehand, all at once, and not recorded."""
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    api: str = "chat"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise UsageError("concurrency and rate exclude each other: set one of them")
        if (self.num_requests is None) == (self.duration_s is None):
            raise UsageError("num_requests and duration exclude each other: set one of them")
        for name in ("concurrency", "rate", "num_requests", "duration_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be more than 0, found {value}")
        if self.api not in _PATHS:
            raise UsageError(f"api {self.api!r} is not known: use {' or '.join(_PATHS)}")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request and what came back. Times are seconds since the run began."""

    index: int
    due: float
    ended: float
    error: str = ""
    """Empty for a whole answer; else the HTTP status and the server's code, or a word for what went wrong."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    arrivals: tuple[float, ...] = ()
    """When each piece of text came; empty without streaming."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """All answers in order of their index, and the seconds from the start to the last one's end."""

    answers: tuple[Answer, ...]
    duration_s: float


async def first_model(endpoint: Endpoint) -> str:
    """The first name that the server lists. Raises ApplianceError where none does."""
    where = f"{endpoint.scheme}://{endpoint.host}:{endpoint.port}{endpoint.prefix}"
    try:
        status, answer = await request_json(endpoint, "GET", "/v1/models")
    except (OSError, httptools.HttpParserError) as error:
        raise ApplianceError(f"no server answers at {where} ({error}): start one, or give another --base-url") from None
    try:
        return str(answer["data"][0]["id"])
    except (TypeError, LookupError):
        raise ApplianceError(
            f"{where}/v1/models answers with status {status} and names no model: name one with --model"
        ) from None


async def run_load(endpoint: Endpoint, spec: LoadSpec, on_answer: Callable[[Answer], None] = lambda a: None) -> Run:
    """Warm up, then put the load on the server until all answers have ended; `on_answer` sees each one.

    A request that fails is an answer with an error; nothing is tried again.
    """
    await asyncio.gather(*(_ask(endpoint, spec, -1 - i, 0.0, lambda: 0.0) for i in range(spec.warmup)))
    start = time.perf_counter()
    answers: list[Answer] = []

    def clock() -> float:
        return time.perf_counter() - start

    async def ask(index: int, due: float) -> None:
        answer = await _ask(endpoint, spec, index, due, clock)
        answers.append(answer)
        on_answer(answer)

    if spec.rate is None:
        await _closed_loop(spec, ask, clock)
    else:
        await _open_loop(spec, ask, clock)
    duration_s = max((answer.ended for answer in answers), default=0.0)
    return Run(tuple(sorted(answers, key=lambda answer: answer.index)), duration_s)


def arrivals(seed: int, rate: float) -> Iterator[float]:
    """Seconds from the start at which requests fall due: gaps are exponential with mean 1 / rate. Never ends."""
    source = random.Random(f"arrivals/{seed}")
    due = 0.0
    while True:
        due += source.expovariate(rate)
        yield due


async def _closed_loop(spec: LoadSpec, ask: Callable[[int, float], Any], clock: Callable[[], float]) -> None:
    indices = iter(itertools.count() if spec.num_requests is None else range(spec.num_requests))

    async def caller() -> None:
        for index in indices:  # shared: each index is one caller's
            now = clock()
            if spec.duration_s is not None and now >= spec.duration_s:
                return
            await ask(index, now)

    async with asyncio.TaskGroup() as group:
        for _ in range(spec.concurrency or 0):
            group.create_task(caller())


async def _open_loop(spec: LoadSpec, ask: Callable[[int, float], Any], clock: Callable[[], float]) -> None:
    assert spec.rate is not None, "an open loop has a rate"
    async with asyncio.TaskGroup() as group:
        for index, due in enumerate(arrivals(spec.seed, spec.rate)):
            if index == spec.num_requests or (spec.duration_s is not None and due >= spec.duration_s):
                return
            await asyncio.sleep(due - clock())
            group.create_task(ask(index, due))


class _FailedRequest(Exception):
    """Carries the word that the failure is counted under."""


def _body(spec: LoadSpec, index: int) -> dict[str, Any]:
    prompt, max_tokens = prompt_and_length(spec.seed, index, spec.prompt_words, spec.output_tokens)
    body: dict[str, Any] = {
        "model": spec.model,
        "max_tokens": max_tokens,
        "temperature": spec.temperature,
        "stream": spec.stream,
    }
    if spec.ignore_eos:
        body["ignore_eos"] = True
    if spec.stream:
        body["stream_options"] = {"include_usage": True}
    if spec.api == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


async def _ask(endpoint: Endpoint, spec: LoadSpec, index: int, due: float, clock: Callable[[], float]) -> Answer:
    pieces: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    error = ""
    try:
        async with (
            asyncio.timeout(spec.timeout_s),
            request(endpoint, "POST", _PATHS[spec.api], _body(spec, index)) as (status, data),
        ):
            if status != 200 or not spec.stream:
                usage = await _whole(status, data, clock, pieces)
            else:
                usage = await _stream(data, clock, pieces)
        if not isinstance(usage.get("completion_tokens"), int) or not isinstance(usage.get("prompt_tokens"), int):
            raise _FailedRequest("no usage")
    except _FailedRequest as failed:
        error = str(failed)
    except TimeoutError:
        error = "timeout"
    except OSError:
        error = "connection"
    except httptools.HttpParserError:
        error = "not HTTP"
    text = "".join(piece for _, piece in pieces)
    if error:
        return Answer(index, due, clock(), error, text=text)
    times = tuple(when for when, piece in pieces if piece) if spec.stream else ()
    return Answer(index, due, clock(), "", usage["prompt_tokens"], usage["completion_tokens"], times, text)


async def _whole(
    status: int, data: AsyncIterator[bytes], clock: Callable[[], float], pieces: list[tuple[float, str]]
) -> dict[str, Any]:
    answer = parse_json(b"".join([piece async for piece in data]))
    if status != 200 or not isinstance(answer, dict):
        raise _FailedRequest(f"{status} {_code(answer)}".strip())
    pieces += [(clock(), _text(choice)) for choice in answer.get("choices") or ()]
    return answer.get("usage") or {}


async def _stream(
    data: AsyncIterator[bytes], clock: Callable[[], float], pieces: list[tuple[float, str]]
) -> dict[str, Any]:
    usage: dict[str, Any] = {}
    rest, is_done = b"", False
    async for part in data:
        now = clock()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                is_done = True
                continue
            event = parse_json(content)
            if not isinstance(event, dict) or "error" in event:
                raise _FailedRequest(f"stream {_code(event)}".strip())
            usage = event.get("usage") or usage
            pieces += [(now, _text(choice)) for choice in event.get("choices") or ()]
    if not is_done:
        raise _FailedRequest("incomplete")
    return usage


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice in any of its forms: message, delta or plain; reasoning is text too."""
    found = choice.get("delta") or choice.get("message") or choice
    return found.get("content") or found.get("reasoning_content") or found.get("text") or ""


def _code(answer: Any) -> str:
    """The server's word for its error, in OpenAI's form, if it has one."""
    error = answer.get("error") if isinstance(answer, dict) else None
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""
