"""The one middleware, in front of everything: access rules, CORS, the body cap, request ids, the last error handler.

Pure ASGI, because Starlette's BaseHTTPMiddleware breaks the detection of disconnects. It knows paths and headers,
not routes.
"""

from __future__ import annotations

import logging
import re
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.server import access
from appliance.server.disconnect import ClientGoneError
from appliance.server.errors import (
    BodyTooLargeError,
    ClientError,
    ForbiddenError,
    InternalError,
    InvalidApiKeyError,
    error_response,
)
from appliance.server.metrics import ServerMetrics
from appliance.server.routes import api_path
from appliance.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class SecurityMiddleware:
    """Wraps the application; see the module's docstring."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self.app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path = api_path(scope["path"])
        if path is not None:
            scope["path"] = path
            scope["raw_path"] = quote(path).encode()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        error = self._refusal(headers, is_api=path is not None)
        cors = _cors_headers(headers) if path is not None and error is None else {}
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = MutableHeaders(scope=message)
                own["x-request-id"] = request_id
                own["x-content-type-options"] = "nosniff"
                own.update(cors)
            await send(message)

        if cors and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight_response(headers)(scope, receive, send_with_headers)
            return
        error = error or self._key_refusal(scope, headers) or self._length_refusal(headers)
        if error is not None:
            self._metrics.reject(error.code)
            # A browser can ask its user for the key only if told Basic.
            basic = isinstance(error, InvalidApiKeyError) and path is None
            response = error_response(error, {"www-authenticate": 'Basic realm="appliance"'} if basic else None)
            await response(scope, receive, send_with_headers)
            return
        try:
            await self.app(scope, self._capped(receive), send_with_headers)
        except (ClientDisconnect, ClientGoneError):
            logger.debug("the client left before request %s was answered", request_id)
        except Exception:
            # The last handler: whatever was not foreseen is logged and told without detail, in the API's form.
            if started:
                raise
            logger.exception("request %s failed", request_id)
            internal = InternalError(f"The server failed to handle this request; its log says more at id {request_id}.")
            self._metrics.reject(internal.code)
            await error_response(internal)(scope, receive, send_with_headers)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if self._refusal(headers, is_api=False) or self._key_refusal(scope, headers):
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers, *, is_api: bool) -> ClientError | None:
        """The Host and Origin rules. No Origin: not a page, allowed. A foreign one: refused, whatever the method."""
        host = headers.get("host", "")
        if not access.host_is_allowed(host, self._settings):
            return ForbiddenError(
                f"The Host header {host[:100]!r} is not one this server answers to: use localhost or 127.0.0.1, or add "
                "the name to allowed_hosts."
            )
        origin = headers.get("origin")
        if origin is None:
            crossing = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
            return ForbiddenError("Requests from pages of another site are refused.") if crossing else None
        if (
            access.origin_is_own(origin, host)
            or access.origin_is_configured(origin, self._settings)
            or (is_api and access.origin_is_local(origin))
        ):
            return None
        return ForbiddenError(f"The origin {origin[:100]!r} may not use this server: add it to allowed_origins.")

    def _key_refusal(self, scope: Scope, headers: Headers) -> ClientError | None:
        if not self._settings.api_keys or scope["path"] == "/health" or access.key_is_valid(headers, self._settings):
            return None
        return InvalidApiKeyError(
            "The API key is missing or wrong: send a valid one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        )

    def _length_refusal(self, headers: Headers) -> ClientError | None:
        length = headers.get("content-length", "0").strip()
        known = length.isdecimal() and len(length) < 20
        return None if known and int(length) <= self._settings.max_body_bytes else self._too_large()

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than the {self._settings.max_body_bytes} bytes allowed.")

    def _capped(self, receive: Receive) -> Receive:
        """Counts what really arrives: a chunked body declares no length."""
        total = 0

        async def capped() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._settings.max_body_bytes:
                raise self._too_large()
            return message

        return capped


def _cors_headers(headers: Headers) -> dict[str, str]:
    """For an allowed origin; never `*`, and nothing for a caller that is no page."""
    origin = headers.get("origin")
    if origin is None:
        return {}
    exposed = "x-request-id, retry-after"
    return {"access-control-allow-origin": origin, "access-control-expose-headers": exposed, "vary": "Origin"}


def _preflight_response(headers: Headers) -> Response:
    """Reflects the asked headers: clients send odd ones (x-stainless-*), and the origin is allowed already."""
    answer = {
        "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", ""),
        "access-control-max-age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        answer["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=answer)
