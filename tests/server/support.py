"""Ways to reach an application under test: in process, and over a real socket."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from appliance.client import EngineClient
from appliance.server.app import create_app
from appliance.server.http_protocol import OneAtATimeProtocol
from appliance.server.settings import ServerSettings
from tests.fake_client import FakeEngineClient

QUESTION = [{"role": "user", "content": "Hi"}]


def in_process(client: EngineClient, **settings: Any) -> httpx.AsyncClient:
    """An HTTP client whose server is a fresh application in this event loop."""
    return reach(create_app(client, ServerSettings(**settings)))


def reach(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def answers_normally(http: httpx.AsyncClient) -> bool:
    """True if an ordinary question gets the ordinary answer of the fake client."""
    response = await http.post("/v1/chat/completions", json={"messages": QUESTION})
    return response.status_code == 200 and bool(response.json()["choices"][0]["message"]["content"])


def events(body: str) -> list[Any]:
    """The JSON of each event of a stream that consists of `data:` lines only and ends with DONE."""
    assert body.endswith("data: [DONE]\n\n")
    blocks = body.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


@contextlib.contextmanager
def socket_server(client: FakeEngineClient, **settings: Any) -> Iterator[int]:
    """A uvicorn server in a thread, on a free port, which is yielded."""
    app = create_app(client, ServerSettings(**settings))
    server = uvicorn.Server(uvicorn.Config(app, http=OneAtATimeProtocol, log_config=None, lifespan="off", ws="none"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until the condition holds; fails if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)
