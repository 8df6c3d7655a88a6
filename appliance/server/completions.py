"""POST /v1/completions: raw text or token ids, one prompt or a batch."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.client import EngineClient, ModelInfo
from appliance.errors import ContextLengthError, InvalidRequestError
from appliance.server.answers import finish_reason, read_answers, submit_choices, usage_content
from appliance.server.body import parse, quoted, read_json
from appliance.server.logprobs import CompletionLogprobs
from appliance.server.models import require_model
from appliance.server.protocol import CompletionRequest
from appliance.server.routes import Handler
from appliance.server.settings import ServerSettings
from appliance.server.sse import TEXT_CHUNK, ChunkWriter
from appliance.server.streaming import StreamingAnswer
from appliance.server.unsupported import refuse_unsupported

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint. It surprises; max_tokens -1 asks for the rest of the context."""

MAX_CHOICES = 256
"""Prompts times n."""


def completions_handler(client: EngineClient, settings: ServerSettings) -> Handler:
    """Answers a CompletionRequest. The k-th answer to a prompt has the index of the prompt times n, plus k."""

    async def completions(request: Request) -> Response:
        content = await read_json(request)
        refuse_unsupported(content, is_chat=False)
        body = parse(CompletionRequest, content)
        info = require_model(client, settings, body.model)
        prompts = _prompts(body.prompt, body.n)
        params = body.sampling_params(info.default_sampling, default_max_tokens=DEFAULT_MAX_TOKENS)
        batch = [await _token_ids(client, info, prompt, params.max_tokens or 0) for prompt in prompts]
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        created = int(time.time())
        echoes = await _echoes(client, prompts, body.n) if body.echo else [""] * (len(batch) * body.n)
        streams = await submit_choices(
            client, batch, params, n=body.n, priority=body.priority, answer_id=answer_id, param="prompt"
        )
        logprobs = [
            None if body.logprobs is None else CompletionLogprobs(client, tokens if body.echo else ())
            for tokens in batch
            for _ in range(body.n)
        ]
        if body.stream:
            writer = ChunkWriter(
                TEXT_CHUNK,
                answer_id=answer_id,
                created=created,
                model=info.id,
                choices=len(streams),
                n=body.n,
                options=body.stream_options,
                echoes=echoes,
            )
            return StreamingAnswer(streams, writer, settings.keepalive_s, logprobs)
        answers = await read_answers(streams, request.receive)
        choices = [
            {
                "index": index,
                "text": echo + answer.text,
                "logprobs": None if form is None else await form.content(answer),
                "finish_reason": finish_reason(answer),
                "stop_reason": answer.stop_reason,
            }
            for index, (answer, echo, form) in enumerate(zip(answers, echoes, logprobs, strict=True))
        ]
        return JSONResponse(
            {
                "id": answer_id,
                "object": "text_completion",
                "created": created,
                "model": info.id,
                "choices": choices,
                "usage": usage_content([answer.usage for answer in answers], body.n),
            }
        )

    return completions


def _prompts(prompt: Any, n: int) -> list[str | list[int]]:
    """One prompt or a batch -> a batch. Raises InvalidRequestError for a wrong shape, for emptiness, for too many."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list):
        is_tokens = bool(prompt) and isinstance(prompt[0], int)
        prompts = [prompt] if is_tokens else prompt
    else:
        prompts = [None]
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt must hold at most {MAX_CHOICES // n} prompts with n {n}, found {len(prompts)}.", param="prompt"
        )
    if not all(isinstance(item, str | list) for item in prompts):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, found "
            f"{quoted(prompt)}.",
            param="prompt",
        )
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt is empty: send at least one character or token.", param="prompt")
    return prompts


async def _token_ids(client: EngineClient, info: ModelInfo, prompt: str | list[int], max_tokens: int) -> list[int]:
    """Token ids of one prompt. Raises InvalidRequestError if a list holds anything but integers."""
    if isinstance(prompt, str):
        return await client.encode_text(prompt)
    if len(prompt) >= info.max_model_len:
        raise ContextLengthError(len(prompt), max_tokens, info.max_model_len, param="prompt")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequestError(f"prompt must hold token ids as integers, found {quoted(token)}.", param="prompt")
    return prompt


async def _echoes(client: EngineClient, prompts: list[str | list[int]], n: int) -> list[str]:
    """The text of its prompt for each choice."""
    texts = [prompt if isinstance(prompt, str) else await client.decode(prompt, param="prompt") for prompt in prompts]
    return [text for text in texts for _ in range(n)]
