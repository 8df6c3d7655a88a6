"""GET /v1/models, and which names a request may call the loaded model by."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from appliance.client import EngineClient, EngineState, ModelInfo
from appliance.errors import EngineDeadError, EngineLoadingError, ModelNotFoundError
from appliance.server.routes import Handler
from appliance.server.settings import ServerSettings


def require_model(client: EngineClient, settings: ServerSettings, name: str) -> ModelInfo:
    """The loaded model, if `name` means it and it can answer.

    Raises EngineLoadingError, EngineDeadError, ModelNotFoundError.
    """
    health = client.health
    info = client.model_info
    detail = f" ({health.detail})" if health.detail else ""
    if health.state in (EngineState.LOADING, EngineState.RESTARTING):
        raise EngineLoadingError(f"The model is {health.state.value}{detail}; try again in a few seconds.")
    if health.state is not EngineState.READY or info is None:
        raise EngineDeadError(f"The engine is {health.state.value}{detail}; restart the appliance.")
    if name not in _names(info.id, settings):
        raise _not_found(name, info.id, settings)
    return info


def list_models_handler(client: EngineClient, settings: ServerSettings) -> Handler:
    """Lists the model that is loaded or being loaded; answers at once and loads nothing."""

    async def list_models(_: Request) -> JSONResponse:
        entry = _entry(client, settings)
        return JSONResponse({"object": "list", "data": [entry] if entry else []})

    return list_models


def retrieve_model_handler(client: EngineClient, settings: ServerSettings) -> Handler:
    """Describes the model of the path parameter `model_id`, which may be any of its names, in all `details`."""

    async def retrieve_model(request: Request) -> JSONResponse:
        name = request.path_params["model_id"]
        entry = _entry(client, settings)
        if entry is None or name not in _names(entry["id"], settings):
            raise _not_found(name, entry["id"] if entry else "", settings)
        details = client.model_info.details if client.model_info else None
        return JSONResponse(entry if details is None else entry | {"details": dataclasses.asdict(details)})

    return retrieve_model


def _names(model_id: str, settings: ServerSettings) -> tuple[str, ...]:
    return (model_id, "default", "", *settings.model_aliases)


def _not_found(name: str, model_id: str, settings: ServerSettings) -> ModelNotFoundError:
    known = ", ".join(filter(None, _names(model_id, settings)))
    return ModelNotFoundError(f"The model {name[:200]!r} is not loaded here: use one of {known}.", param="model")


def _entry(client: EngineClient, settings: ServerSettings) -> dict[str, Any] | None:
    """A superset of what clients read: OpenAI's four fields, vLLM's, OpenRouter's and llama.cpp's."""
    info = client.model_info
    ready = client.health.state is EngineState.READY
    model_id = info.id if info else settings.model_name
    if not model_id:
        return None
    entry: dict[str, Any] = {
        "id": model_id,
        "object": "model",
        "created": info.created if info else 0,
        "owned_by": "appliance",
        "aliases": ["default", *settings.model_aliases],
        "status": {"value": "loaded" if ready else client.health.state.value},
    }
    if info is not None:
        entry |= {
            "max_model_len": info.max_model_len,
            "context_length": info.max_model_len,
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "meta": {"n_ctx": info.max_model_len, "n_vocab": info.vocab_size, "format": info.format},
            "warnings": list(info.warnings),
        }
    return entry
