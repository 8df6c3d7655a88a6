"""Servers for the load generator: ours on a fake engine, and a scripted one whose bytes and pauses are known."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from appliance.bench.http import Endpoint
from appliance.bench.load import LoadSpec
from appliance.bench.prompts import Range

Part = bytes | float
"""Bytes to send or seconds to pause."""


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"


@contextlib.contextmanager
def scripted_server(
    script: Callable[[dict[str, Any]], tuple[int, Sequence[Part]]],
) -> Iterator[tuple[Endpoint, list[dict[str, Any]]]]:
    """A server that answers a body with the status and parts the script gives; yields itself and the bodies it got.

    Each answer ends with its connection, as HTTP/1.0 does it.
    """
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append({"path": self.path, "authorization": self.headers["authorization"], **body})
            status, parts = script(body)
            self.send_response(status)
            self.end_headers()
            for part in parts:
                if isinstance(part, float):
                    time.sleep(part)
                else:
                    self.wfile.write(part)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "scripted"}]}')

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Endpoint.parse(f"http://127.0.0.1:{server.server_address[1]}"), bodies
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def load_spec(**changes: Any) -> LoadSpec:
    """One caller, four requests, small."""
    values: dict[str, Any] = {"concurrency": 1, "num_requests": 4}
    values |= {"model": "default", "prompt_words": Range(20, 20), "output_tokens": Range(4, 4)}
    return LoadSpec(**(values | changes))
