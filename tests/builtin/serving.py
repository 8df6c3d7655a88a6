"""`appliance serve` as a user runs it: a process of its own on a free port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    base: str
    process: psutil.Process
    seconds_to_ready: float

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.base}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def ask(self, content: str = "What is the capital of France?", max_tokens: int = 16) -> str:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": max_tokens}
        reply = httpx.post(f"{self.base}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def assert_idle(self) -> None:
        """Nothing runs, nothing waits and every block is free, within a few seconds."""
        for _ in range(50):
            found = self.metrics()
            busy = found["appliance_requests_running"] + found["appliance_requests_waiting"]
            if not busy and found["appliance_kv_blocks_free"] == found["appliance_kv_blocks_total"]:
                return
            time.sleep(0.1)
        raise AssertionError(f"still busy: {found}")

    def cpu_share(self, seconds: float) -> float:
        """Of one core, of this process and all its children, over the next `seconds`."""
        processes = [self.process, *self.process.children(recursive=True)]
        before = [sum(p.cpu_times()[:2]) for p in processes]
        time.sleep(seconds)
        return sum(sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)) / seconds


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "appliance", "serve", str(model), "--port", str(port), *flags]
    start = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            while not _is_ready(base):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() - start < 120, "the server does not become ready"
                time.sleep(0.1)
            yield Server(base, psutil.Process(process.pid), time.monotonic() - start)
        finally:
            process.terminate()
            assert process.wait(30) == 0


def _is_ready(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health").status_code == 200
    except httpx.TransportError:
        return False
