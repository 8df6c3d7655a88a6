"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.client import EngineClient
from appliance.errors import InvalidRequestError, UnsupportedValueError
from appliance.server.answers import finish_reason, read_answers, submit_choices, usage_content
from appliance.server.body import parse, read_json
from appliance.server.logprobs import ChatLogprobs
from appliance.server.messages import normalise_messages
from appliance.server.models import require_model
from appliance.server.protocol import ChatRequest
from appliance.server.routes import Handler
from appliance.server.settings import ServerSettings
from appliance.server.sse import CHAT_CHUNK, ChunkWriter
from appliance.server.streaming import StreamingAnswer
from appliance.server.unsupported import refuse_unsupported

_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of transformers' apply_chat_template that are ours to give."""


def chat_completions_handler(client: EngineClient, settings: ServerSettings) -> Handler:
    """Answers a ChatRequest. Without max_tokens an answer may use the rest of the context."""

    async def chat_completions(request: Request) -> Response:
        content = await read_json(request)
        refuse_unsupported(content, is_chat=True)
        body = parse(ChatRequest, content)
        info = require_model(client, settings, body.model)
        messages = normalise_messages(body.messages, info)
        kwargs = template_kwargs(body, messages)
        params = body.sampling_params(info.default_sampling, default_max_tokens=None)
        tokens = await client.encode_chat(messages, template_kwargs=kwargs)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        created = int(time.time())
        streams = await submit_choices(
            client, [tokens], params, n=body.n, priority=body.priority, answer_id=answer_id, param="messages"
        )
        logprobs = ChatLogprobs(client) if body.logprobs else None
        if body.stream:
            writer = ChunkWriter(
                CHAT_CHUNK,
                answer_id=answer_id,
                created=created,
                model=info.id,
                choices=body.n,
                n=body.n,
                options=body.stream_options,
            )
            return StreamingAnswer(streams, writer, settings.keepalive_s, [logprobs] * body.n)
        answers = await read_answers(streams, request.receive)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": None if logprobs is None else await logprobs.content(answer),
                "finish_reason": finish_reason(answer),
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return JSONResponse(
            {
                "id": answer_id,
                "object": "chat.completion",
                "created": created,
                "model": info.id,
                "choices": choices,
                "usage": usage_content([answer.usage for answer in answers], body.n),
            }
        )

    return chat_completions


def template_kwargs(body: ChatRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What the template gets besides the messages. Raises InvalidRequestError, UnsupportedValueError."""
    if reserved := sorted(_RESERVED_TEMPLATE_KWARGS & body.chat_template_kwargs.keys()):
        raise UnsupportedValueError(
            f"chat_template_kwargs may not set {', '.join(reserved)}: leave it out.", param="chat_template_kwargs"
        )
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            raise UnsupportedValueError(
                "add_generation_prompt false is supported only with continue_final_message true.",
                param="add_generation_prompt",
            )
        return body.chat_template_kwargs
    if body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: set one of them to false.",
            param="continue_final_message",
        )
    if messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            f"continue_final_message needs an assistant message at the end, found role {messages[-1]['role']}.",
            param="continue_final_message",
        )
    return body.chat_template_kwargs | {"continue_final_message": True}
