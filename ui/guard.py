"""What stands between the network and the mounted Gradio app, and what calms it. Written for Gradio 6.31.

Gradio serves far more than a chat needs: a proxy, fetching files by URL, uploads, run histories, component servers.
`GradioGuard` lets through what the page asks for and sets the headers that keep the page to its own origin.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import gradio as gr
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_logger = logging.getLogger(__name__)

_ALLOWED_API = ("queue/join", "queue/data", "run/predict", "cancel", "reset", "startup-events")

# Gradio's page starts with inline scripts and sets styles inline. connect-src and img-src keep an image or a link in
# a model's answer from carrying the chat to another host.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class GradioGuard:
    """ASGI middleware around the whole app; touches only paths of Gradio and responses that are HTML pages."""

    def __init__(self, app: ASGIApp, path: str = "/") -> None:
        self._app = app
        self._api = path.rstrip("/") + "/gradio_api/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(self._api + "heartbeat/"):
            # Gradio keeps this open as long as the page, and a browser opens six connections to a host in all: the
            # sixth tab would not load. A page that leaves is noticed by its answer's own connection.
            await Response(b"data: ALIVE\n\n", media_type="text/event-stream")(scope, receive, send)
            return
        if self._is_refused(scope["path"]):
            await PlainTextResponse("Not found", status_code=404)(scope, receive, send)
            return

        async def send_with_headers(event: Message) -> None:
            if event["type"] == "http.response.start" and _is_page(event):
                event["headers"] = [*event["headers"], *_HEADERS]
            await send(event)

        await self._app(scope, receive, send_with_headers)

    def _is_refused(self, path: str) -> bool:
        return path.startswith(self._api) and not path.removeprefix(self._api).startswith(_ALLOWED_API)


def _is_page(start: MutableMapping[str, Any]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/html") for name, value in start["headers"])


QUEUE_SETTINGS: dict[str, float] = {
    "sleep_when_free": 0.05,
    "progress_update_sleep_when_free": 0.5,
    "max_thread_count": 256,
}
"""Attributes of Gradio's queue: seconds between looks at an empty queue (1 ms burns 2.5 % of a core when idle) and
events that run at a time (40 is fewer than the engine's batch)."""


def calm_queue(blocks: gr.Blocks) -> list[str]:
    """Apply QUEUE_SETTINGS before the queue starts; returns (and logs) the names this Gradio no longer has."""
    missing = [name for name in QUEUE_SETTINGS if not hasattr(blocks._queue, name)]
    for name, value in QUEUE_SETTINGS.items():
        if name not in missing:
            setattr(blocks._queue, name, value)
    if missing:
        _logger.warning("gradio %s has no queue setting %s; the idle page costs more", gr.__version__, missing)
    return missing
