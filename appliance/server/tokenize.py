"""POST /tokenize and POST /detokenize, in vLLM's form (`prompt`, `messages`) and llama.cpp's (`content`)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.client import EngineClient, ModelInfo
from appliance.errors import InvalidRequestError, UnsupportedValueError
from appliance.server.body import parse, read_json
from appliance.server.chat import template_kwargs
from appliance.server.messages import normalise_messages
from appliance.server.models import require_model
from appliance.server.protocol import ChatRequest
from appliance.server.routes import Handler
from appliance.server.settings import ServerSettings

_REFUSED = {
    "parse_special": (True, "special tokens in the text are always recognised"),
    "with_pieces": (False, "send the ids to /detokenize for their text"),
    "return_token_strs": (False, "send the ids to /detokenize for their text"),
}
"""Field: the only value that is served, and what to do instead of others."""


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize, but for chats. Each field has the default of the program whose form it belongs to."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str = ""
    prompt: str | None = None
    add_special_tokens: bool = True
    content: str | None = None
    add_special: bool = False


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str = ""
    tokens: list[int]


def tokenize_handler(client: EngineClient, settings: ServerSettings) -> Handler:
    """Answers `tokens`, `count` and `max_model_len` for raw text, or for a chat as the model would get it."""

    async def tokenize(request: Request) -> Response:
        content = await read_json(request)
        for name, (served, advice) in _REFUSED.items():
            if content.get(name, served) is not served:
                raise UnsupportedValueError(f"{name} can only be {str(served).lower()}: {advice}.", param=name)
        body = parse(TokenizeRequest, content)
        info = require_model(client, settings, body.model)
        forms = [name for name in ("prompt", "content", "messages") if name in content]
        if len(forms) != 1:
            raise InvalidRequestError(
                f"Exactly one of prompt, content and messages is needed, found {' and '.join(forms) or 'none'}.",
                param=forms[-1] if forms else "prompt",
            )
        if body.prompt is not None:
            tokens = await client.encode_text(body.prompt, add_special_tokens=body.add_special_tokens)
        elif body.content is not None:
            tokens = await client.encode_text(body.content, add_special_tokens=body.add_special)
        else:
            tokens = await _encode_chat(client, content, info)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": info.max_model_len})

    return tokenize


def detokenize_handler(client: EngineClient, settings: ServerSettings) -> Handler:
    """Answers the text of `tokens`, special tokens included, as `prompt` (vLLM) and as `content` (llama.cpp)."""

    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeRequest, await read_json(request))
        require_model(client, settings, body.model)
        text = await client.decode(body.tokens, param="tokens")
        return JSONResponse({"prompt": text, "content": text})

    return detokenize


async def _encode_chat(client: EngineClient, content: dict[str, Any], model: ModelInfo) -> list[int]:
    body = parse(ChatRequest, content)
    messages = normalise_messages(body.messages, model)
    return await client.encode_chat(messages, template_kwargs=template_kwargs(body, messages))
