"""A uvicorn server in a thread, for tests that need a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI


@contextlib.contextmanager
def serve(build: Callable[[], FastAPI]) -> Iterator[str]:
    """Yields the base URL; the server has ended when the block has.

    `build` is called in the server's event loop, for Gradio makes and forgets event loops elsewhere.
    """
    servers: list[uvicorn.Server] = []

    async def run(listener: socket.socket) -> None:
        config = uvicorn.Config(build(), log_level="warning", timeout_graceful_shutdown=1)
        servers.append(uvicorn.Server(config))
        await servers[0].serve([listener])

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(run(listener)), daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not (servers and servers[0].started):
                assert thread.is_alive()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for server in servers:
                server.should_exit = True
            thread.join(timeout=10)
