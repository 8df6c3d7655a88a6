"""A small HTTP/1.1 client: one connection a request, the body as it arrives.

The generator shares its machine with the server it measures, so a chunk must cost little: asyncio's streams and
httptools (the parser that uvicorn brings along) instead of a general client. Knows no protocol above HTTP.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from appliance.errors import UsageError

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is and what opens it. `prefix` stands before every path, without a final slash."""

    scheme: str
    host: str
    port: int
    prefix: str
    api_key: str = ""

    @classmethod
    def parse(cls, url: str, api_key: str = "") -> Endpoint:
        """`http[s]://host[:port][/prefix]`, with or without a final `/v1`. Raises UsageError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"the URL {url!r} is not of a server: write http://host:port, e.g. http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme], prefix, api_key)

    def head(self, method: str, path: str, body: bytes) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            "Accept: */*",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(slots=True)
class _Response:
    """What the parser has found so far; the methods are httptools' callbacks."""

    is_headed: bool = False
    is_complete: bool = False
    has_length: bool = False
    pieces: list[bytes] = field(default_factory=list)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.is_headed = True

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.is_complete = True


@asynccontextmanager
async def request(
    endpoint: Endpoint, method: str, path: str, content: object = None
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """The status of the answer, and its body piece by piece; `content` is sent as JSON.

    Raises OSError where there is no connection or it breaks before the body has ended, and
    httptools.HttpParserError where the answer is no HTTP.
    """
    body = b"" if content is None else json.dumps(content).encode()
    context = ssl.create_default_context() if endpoint.scheme == "https" else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    try:
        writer.write(endpoint.head(method, path, body) + body)
        response = _Response()
        parser = httptools.HttpResponseParser(response)
        while not response.is_headed:
            await _read(reader, parser, response)
        yield parser.get_status_code(), _body(reader, parser, response)
    finally:
        writer.close()


async def request_json(endpoint: Endpoint, method: str, path: str, content: object = None) -> tuple[int, Any]:
    """The status and the JSON of a whole answer; None where the body is no JSON. Raises as `request` does."""
    async with request(endpoint, method, path, content) as (status, pieces):
        return status, parse_json(b"".join([piece async for piece in pieces]))


def parse_json(text: bytes) -> Any:
    """The value, None where the text is no JSON: a server that answers nonsense is counted, not believed."""
    try:
        return json.loads(text)
    except ValueError:
        return None


async def _body(reader: asyncio.StreamReader, parser: Any, response: _Response) -> AsyncIterator[bytes]:
    while True:
        pieces, response.pieces = response.pieces, []
        for piece in pieces:
            yield piece
        if response.is_complete:
            return
        await _read(reader, parser, response)


async def _read(reader: asyncio.StreamReader, parser: Any, response: _Response) -> None:
    data = await reader.read(_READ_BYTES)
    if data:
        parser.feed_data(data)
    elif response.is_headed and not response.has_length:
        response.is_complete = True  # HTTP/1.0: the end of the connection is the end of the body
    else:
        raise ConnectionError("the connection was closed in the middle of an answer")
