"""Every error as OpenAI's clients read it: `{"error": {"message", "type", "param", "code", ...}}`.

It knows the error tree and HTTP; not what went wrong or why.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from appliance.errors import ApplianceError, EngineLoadingError, QueueFullError


class ClientError(ApplianceError):
    """An HTTP-level fault of the caller."""

    code = "invalid_request"
    status = 400
    type = "invalid_request_error"


class InvalidApiKeyError(ClientError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    status = 401


class ForbiddenError(ClientError):
    """The Host or Origin header is not one that is answered."""

    code = "forbidden"
    status = 403
    type = "permission_error"


class RouteNotFoundError(ClientError):
    """No such path, or one of a later release."""

    code = "not_found"
    status = 404


class MethodNotAllowedError(ClientError):
    """The path exists, with other methods."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTooLargeError(ClientError):
    """The body exceeds the limit."""

    code = "body_too_large"
    status = 413


class ContentTypeError(ClientError):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415


class RequestFailedError(ApplianceError):
    """The engine gave up on one request; it still serves the others."""

    code = "request_failed"


class InternalError(ApplianceError):
    """A fault of this program; the log has the rest."""


def error_content(error: ApplianceError) -> dict[str, Any]:
    """The JSON object of an error."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields | error.extra()}


def error_response(error: ApplianceError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response to an error, with the headers that its kind asks for.

    Retry-After is in whole seconds: openai-python retries 429 and 503 after it, Zed parses integers only.
    """
    own: dict[str, str] = {}
    if isinstance(error, MethodNotAllowedError):
        own["allow"] = error.allowed
    elif isinstance(error, EngineLoadingError):
        own["retry-after"] = "2"
    elif isinstance(error, QueueFullError):
        own["retry-after"] = "1"
    elif isinstance(error, InvalidApiKeyError):
        own["www-authenticate"] = "Bearer"
    return JSONResponse(error_content(error), HTTPStatus(error.status), own | dict(headers or {}))
