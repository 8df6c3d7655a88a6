"""What paths without a route answer: 404 or 405 as JSON, on API paths also when a page is mounted at `/`."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from appliance.server.errors import MethodNotAllowedError, RouteNotFoundError
from appliance.server.routes import Handler

_LATER = frozenset({"responses", "messages", "embeddings", "api"})
"""First segments, after /v1, of endpoints that this version does not have."""


def unmatched_handler(app: FastAPI) -> Handler:
    """Refuses everything; to be registered for the API's prefixes after every other route."""

    async def unmatched(request: Request) -> Response:
        raise missing_route(app, request)

    return unmatched


def missing_route(app: FastAPI, request: Request) -> RouteNotFoundError | MethodNotAllowedError:
    """Why no route matched: the path is unknown, or known with other methods."""
    path = request.url.path
    methods = {
        method
        for route in app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL
        for method in route.methods or ()
    }
    if methods:
        allowed = ", ".join(sorted(methods))
        return MethodNotAllowedError(f"{request.method} is not allowed for {path}: use {allowed}.", allowed)
    if path.removeprefix("/v1")[1:].split("/", 1)[0] in _LATER:
        return RouteNotFoundError(
            f"{path[:200]} is not served in this version: use /v1/chat/completions or /v1/completions."
        )
    return RouteNotFoundError(f"There is nothing at {path[:200]}: the API is at /v1/chat/completions and /v1/models.")
