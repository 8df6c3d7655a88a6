from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

SERVER = """
import uvicorn
from fastapi import FastAPI
from appliance.ui.app import mount_ui
from tests.fake_client import FakeEngineClient

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print("started", flush=True)

Server(uvicorn.Config(mount_ui(FastAPI(), FakeEngineClient()), port=0, log_level="error")).run()
"""


@pytest.mark.slow
def test_an_idle_page_costs_less_than_one_percent_of_a_core() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            time.sleep(2)
            watched = psutil.Process(process.pid)
            before = watched.cpu_times()
            time.sleep(10)
            after = watched.cpu_times()
        finally:
            process.kill()
    seconds = after.user + after.system - before.user - before.system
    assert seconds / 10 < 0.01
