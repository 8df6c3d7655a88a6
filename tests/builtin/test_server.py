"""The whole server on the built-in model: clients that leave, prompts that cannot fit, idleness, recovery."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.builtin.serving import Server, serving


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--num-kv-blocks", "600", "--max-model-len", "4096") as running:
        yield running


def leave(server: Server, number: int) -> None:
    """Ask for a long answer and reset the connection: while queued, in prefill or in decode, by the number."""
    stream = "true" if number % 2 else "false"
    prompt = f"[{number}] Write a long story. " + "Once upon a time. " * (number % 7) * 20
    body = (
        f'{{"messages":[{{"role":"user","content":"{prompt}"}}],"max_tokens":600,"ignore_eos":true,"stream":{stream},'
        f'"n":{1 + number % 3}}}'
    ).encode()
    address = urlsplit(server.base)
    assert address.hostname is not None
    assert address.port is not None
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.05 * (number % 10))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not a polite end


def test_two_hundred_dropped_clients_leave_nothing_behind(server: Server) -> None:
    """Public bugs tabbyAPI#428 and vllm#14326: streaming and not, with one answer and with several."""
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda number: leave(server, number), range(200)))
    server.assert_idle()
    assert "Paris" in server.ask()


def test_prompts_that_cannot_fit_are_refused_and_the_server_is_idle_after(server: Server) -> None:
    """Public bugs tabbyAPI#203 and vllm#35541: an error at once, then a normal answer, then no busy core."""
    for _ in range(5):
        body = {"messages": [{"role": "user", "content": "word " * 5000}]}
        reply = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=10)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert "Paris" in server.ask()
    time.sleep(1)
    assert server.cpu_share(6) < 0.01
    server.assert_idle()


def test_huge_prompts_are_refused_while_the_server_goes_on(server: Server) -> None:
    """Text that cannot fit is refused before it is tokenized, which would hold every other request up."""
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "word " * 4_000_000, "max_tokens": 1}
        replies = [pool.submit(httpx.post, f"{server.base}/v1/completions", json=body, timeout=60) for _ in range(2)]
        for _ in range(5):
            assert httpx.get(f"{server.base}/health", timeout=5).status_code == 200
        assert [reply.result().json()["error"]["code"] for reply in replies] == ["context_length_exceeded"] * 2
    assert "Paris" in server.ask()


def test_killed_engine_answers_every_waiter_and_comes_back(server: Server) -> None:
    engine = next(p for p in server.process.children() if "appliance.engine" in p.cmdline())
    with ThreadPoolExecutor(4) as pool:
        waiters = [
            pool.submit(httpx.post, f"{server.base}/v1/chat/completions", json=LONG, timeout=60) for _ in range(4)
        ]
        time.sleep(1.0)
        os.kill(engine.pid, signal.SIGKILL)
        for waiter in waiters:
            assert waiter.result().status_code == 500
            assert waiter.result().json()["error"]["code"] == "engine_dead"
    assert httpx.get(f"{server.base}/health").status_code == 503
    deadline = time.monotonic() + 60
    while httpx.get(f"{server.base}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "Paris" in server.ask()


LONG = {"messages": [{"role": "user", "content": "Count to a thousand."}], "max_tokens": 3000, "ignore_eos": True}


def test_prompt_larger_than_the_pool(folder: Path) -> None:
    """The context is what the pool holds; a longer prompt is refused at once."""
    with serving(folder, "--num-kv-blocks", "50", "--max-model-len", "2048") as small:
        body = {"prompt": "word " * 1000, "max_tokens": 4}
        for _ in range(5):
            reply = httpx.post(f"{small.base}/v1/completions", json=body, timeout=10)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert "Paris" in small.ask()


@pytest.mark.slow
def test_second_start_is_ready_in_ten_seconds(folder: Path) -> None:
    with serving(folder) as running:
        assert running.seconds_to_ready < 10
        assert "Paris" in running.ask()
