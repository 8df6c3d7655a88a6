"""An `EngineClient` without an engine: scripted answers, visible bookkeeping, faults on demand.

It knows the contract of `appliance.client` and nothing else: no torch, no processes. One token is one character of
text; one scripted delta is one completion token. Requests are pulled, not pushed: a delta exists when it is awaited.
Log probabilities are invented: -1/8 for the first token of a prompt or an answer, -2/8 for the second; the likeliest
token everywhere is "!", and the others are impossible.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.client import (
    EngineState,
    EngineStats,
    FinishReason,
    Health,
    ModelInfo,
    Priority,
    RequestOutput,
    TokenLogprobs,
    Usage,
)
from appliance.errors import (
    ApplianceError,
    ContextLengthError,
    EngineDeadError,
    EngineLoadingError,
    InvalidRequestError,
    QueueFullError,
)
from appliance.sampling_params import SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 0x110000


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """What the surface under test handed to `submit`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: Priority
    param: str
    child_index: int

    @property
    def prompt(self) -> str:
        return "".join(map(chr, self.prompt_token_ids))


def scored(token_id: int, place: int, num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """What a token is said to be worth: one value, or nothing if nobody asks."""
    if num_top is None:
        return ()
    ranking = ((ord("!"), 0.0), *((ord("a") + index, -9999.0) for index in range(25)))
    return (TokenLogprobs(token_id, -place / 8, ranking[:num_top]),)


class FakeRequestStream:
    """One scripted answer. Holds its blocks from `submit` until it has finished, failed or been closed."""

    def __init__(self, client: FakeEngineClient, request: SubmittedRequest, deltas: Sequence[str]) -> None:
        self.request_id = request.request_id
        self._client = client
        self._request = request
        room = client.info.max_model_len - len(request.prompt_token_ids)
        self._limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        self._deltas = deltas
        self._position = 0
        self._ended = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        client = self._client
        await client.gate.wait()
        await asyncio.sleep(client.delay)
        if self._ended:
            raise StopAsyncIteration
        if client.fail_after is not None and self._position >= client.fail_after:
            self._end()
            raise EngineDeadError("The engine process ended while it answered this request; send the request again.")
        params, prompt = self._request.params, self._request.prompt_token_ids
        prompt_logprobs = [scored(token, place, params.prompt_logprobs) for place, token in enumerate(prompt[1:], 2)]
        reason: FinishReason | None = None
        if not self._limit:
            self._end()
            usage = Usage(len(prompt), 0, client.cached_tokens)
            return RequestOutput("", (), usage, FinishReason.LENGTH, prompt_logprobs=sum(prompt_logprobs, ()))
        text = self._deltas[self._position] if self._position < len(self._deltas) else ""
        self._position += 1
        client.generated += 1
        token_id = client.token_of(text)
        if self._position >= len(self._deltas):
            reason = client.finish_reason
        elif self._position >= self._limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end()
            client.finished.append(self.request_id)
        usage = Usage(len(prompt), self._position, client.cached_tokens)
        logprobs = scored(token_id, self._position, params.logprobs)
        told = sum(prompt_logprobs, ()) if self._position == 1 else ()
        return RequestOutput(text, (token_id,), usage, reason, logprobs=logprobs, prompt_logprobs=told)

    async def aclose(self) -> None:
        if not self._ended:
            self._end()
            self._client.aborted.append(self.request_id)

    def _end(self) -> None:
        self._ended = True
        self._client.running.pop(self.request_id, None)


class FakeEngineClient:
    """Answers the i-th submission with `answers[i % len(answers)]`.

    Attributes, all of which may be set at will: `answers` lists of text deltas; `delay` seconds before each delta;
    `fail_after` the number of deltas after which a stream raises EngineDeadError; `refuse_with` what `submit` raises;
    `gate` an Event that holds back every delta while cleared; `submitted`, `finished`, `aborted` the history; `running`
    the live requests and the blocks they hold; `messages`, `template_kwargs` what `encode_chat` was last given.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[str]] = (("Hello", ",", " world", "!"),),
        *,
        delay: float = 0.0,
        fail_after: int | None = None,
        finish_reason: FinishReason = FinishReason.STOP,
        state: EngineState = EngineState.READY,
        model_id: str = "fake/model-4bit",
        max_model_len: int = 4096,
        max_requests: int = 64,
        num_kv_blocks: int = 4096,
        has_chat_template: bool = True,
        is_text_part: bool = False,
        has_bos: bool = False,
        default_sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.answers = answers
        self.delay = delay
        self.fail_after = fail_after
        self.finish_reason = finish_reason
        self.state = state
        self.detail = ""
        self.has_bos = has_bos
        self.max_requests = max_requests
        self.cached_tokens = 0
        self.refuse_with: ApplianceError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.submitted: list[SubmittedRequest] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.running: dict[str, int] = {}
        self.generated = 0
        self.messages: list[dict[str, Any]] = []
        self.template_kwargs: dict[str, Any] = {}
        self._serial = itertools.count()
        self._given: list[str] = []
        self.info = ModelInfo(
            id=model_id,
            created=1_750_000_000,
            architecture="FakeForCausalLM",
            format="GPTQ 4-bit, group 128",
            bits=4,
            kernels=("fake",),
            dtype="bfloat16",
            device="cpu",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            num_kv_blocks=num_kv_blocks,
            block_size=BLOCK_SIZE,
            num_contexts=2,
            has_chat_template=has_chat_template,
            default_sampling=default_sampling or {},
            is_text_part=is_text_part,
        )

    @property
    def health(self) -> Health:
        return Health(self.state, self.detail)

    @property
    def model_info(self) -> ModelInfo | None:
        return None if self.state is EngineState.LOADING else self.info

    @property
    def free_blocks(self) -> int:
        return self.info.num_kv_blocks - sum(self.running.values())

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            requests_running=len(self.running),
            kv_blocks_total=self.info.num_kv_blocks,
            kv_blocks_free=self.free_blocks,
            prompt_tokens=sum(len(request.prompt_token_ids) for request in self.submitted),
            generation_tokens=self.generated,
            steps=self.generated,
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        self._require_ready()
        if not self.info.has_chat_template:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        self.messages = [dict(message) for message in messages]
        self.template_kwargs = dict(template_kwargs or {})
        text = "\n".join(f"<{message['role']}>{message['content']}" for message in messages)
        if not self.template_kwargs.get("continue_final_message"):
            text += "\n<assistant>"
        return [ord(character) for character in text]

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A BOS would be a token 2."""
        self._require_ready()
        bos = [2] if add_special_tokens and self.has_bos else []
        return bos + [ord(character) for character in text]

    async def decode(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        self._require_ready()
        _check_token_ids(token_ids, param)
        return "".join(map(chr, token_ids))

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        texts = [self._given[token - VOCAB_SIZE] if token >= VOCAB_SIZE else chr(token) for token in token_ids]
        return [text.encode("utf-8", "replace") for text in texts]

    def token_of(self, delta: str) -> int:
        """An id for a scripted delta, beyond those of characters."""
        self._given.append(delta)
        return VOCAB_SIZE + len(self._given) - 1

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: Priority = Priority.NORMAL,
        request_id: str | None = None,
        param: str = "messages",
        child_index: int = 0,
    ) -> FakeRequestStream:
        self._require_ready()
        if self.refuse_with is not None:
            raise self.refuse_with
        length = len(prompt_token_ids)
        if not length:
            raise InvalidRequestError(f"{param} holds no token; send at least one.", param=param)
        if length >= self.info.max_model_len:
            raise ContextLengthError(length, params.max_tokens or 0, self.info.max_model_len, param=param)
        _check_token_ids(prompt_token_ids, param)
        params.check_vocabulary(VOCAB_SIZE)
        if len(self.running) >= self.max_requests:
            raise QueueFullError(f"{len(self.running)} requests are queued already; try again in a moment.")
        serial = next(self._serial)
        request_id = request_id or f"request-{serial}"
        request = SubmittedRequest(request_id, tuple(prompt_token_ids), params, priority, param, child_index)
        self.submitted.append(request)
        self.running[request.request_id] = -(-length // BLOCK_SIZE)
        return FakeRequestStream(self, request, self.answers[serial % len(self.answers)])

    def _require_ready(self) -> None:
        if self.state in (EngineState.LOADING, EngineState.RESTARTING):
            raise EngineLoadingError("The model is still being loaded; try again in a moment.")
        if self.state is not EngineState.READY:
            raise EngineDeadError("The engine has ended and will not be restarted; restart the appliance.")


def _check_token_ids(token_ids: Sequence[int], param: str) -> None:
    if bad := [token for token in token_ids if not 0 <= token < VOCAB_SIZE]:
        raise InvalidRequestError(f"Token id {bad[0]} is not below the vocabulary's {VOCAB_SIZE}.", param=param)
