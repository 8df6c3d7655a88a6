"""Which paths belong to the API, as against the user interface that may be mounted at `/`, and what answers them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]

API_PREFIXES = (
    "v1",
    "api",
    "models",
    "chat",
    "completions",
    "responses",
    "messages",
    "embeddings",
    "tokenize",
    "detokenize",
    "health",
    "metrics",
    "version",
)
"""First path segments that are answered by the API, with an error where it has no such route."""

_SLASHES = re.compile("/{2,}")


def api_path(path: str) -> str | None:
    """The path with repeated and trailing slashes removed if it belongs to the API, else None."""
    plain = _SLASHES.sub("/", path).rstrip("/")
    return plain if plain[1:].split("/", 1)[0] in API_PREFIXES else None
