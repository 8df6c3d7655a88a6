"""Composes the HTTP surface. It knows an `EngineClient` and nothing behind it."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from appliance.client import EngineClient, EngineState
from appliance.errors import ApplianceError
from appliance.server.chat import chat_completions_handler
from appliance.server.completions import completions_handler
from appliance.server.errors import error_response
from appliance.server.fallback import missing_route, unmatched_handler
from appliance.server.health import health_handler, metrics_handler, version
from appliance.server.measured import MeasuredClient
from appliance.server.metrics import ServerMetrics
from appliance.server.models import list_models_handler, retrieve_model_handler
from appliance.server.routes import API_PREFIXES
from appliance.server.security import SecurityMiddleware
from appliance.server.settings import ServerSettings
from appliance.server.tokenize import detokenize_handler, tokenize_handler

_ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_app(client: EngineClient, settings: ServerSettings) -> FastAPI:
    """The application with every API route, each also without `/v1`.

    A user interface may be mounted at `/` afterwards; hand it `app.state.client`, which counts its requests too.
    """
    metrics = ServerMetrics(client)
    measured = MeasuredClient(client, metrics)
    # The interactive documentation of FastAPI loads its scripts from elsewhere; this server fetches nothing.
    app = FastAPI(title="appliance", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.client = measured
    # Plain routes: bodies are read in `appliance.server.body`, where NaN is refused and errors have OpenAI's form.
    for prefix in ("/v1", ""):
        app.add_route(f"{prefix}/models", list_models_handler(measured, settings), ["GET"])
        app.add_route(f"{prefix}/models/{{model_id:path}}", retrieve_model_handler(measured, settings), ["GET"])
        app.add_route(f"{prefix}/chat/completions", chat_completions_handler(measured, settings), ["POST"])
        app.add_route(f"{prefix}/completions", completions_handler(measured, settings), ["POST"])
        app.add_route(f"{prefix}/tokenize", tokenize_handler(measured, settings), ["POST"])
        app.add_route(f"{prefix}/detokenize", detokenize_handler(measured, settings), ["POST"])
    app.add_route("/health", health_handler(measured), ["GET"])
    app.add_route("/metrics", metrics_handler(metrics), ["GET"])
    app.add_route("/version", version, ["GET"])
    for segment in API_PREFIXES:
        app.add_route(f"/{segment}", unmatched_handler(app), _ALL_METHODS)
        app.add_route(f"/{segment}/{{rest:path}}", unmatched_handler(app), _ALL_METHODS)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApplianceError)
        metrics.reject(error.code)
        # openai-python retries every 5xx unless told otherwise.
        hopeless = error.status >= 500 and client.health.state in (EngineState.FAILED, EngineState.STOPPED)
        return error_response(error, {"x-should-retry": "false"} if hopeless else None)

    async def unmatched(request: Request, _: Exception) -> Response:
        return error_response(missing_route(app, request))

    app.add_exception_handler(ApplianceError, refused)
    app.add_exception_handler(HTTPException, unmatched)
    app.add_middleware(SecurityMiddleware, settings=settings, metrics=metrics)
    return app
