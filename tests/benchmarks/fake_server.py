"""Our server on a fake engine, as a program: PORT DELAY FILE. FILE gets the ids of this process and of a helper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import uvicorn

from appliance.server.app import create_app
from appliance.server.settings import ServerSettings
from tests.fake_client import FakeEngineClient

if __name__ == "__main__":
    port, delay, file = sys.argv[1:]
    helper = subprocess.Popen(["sleep", "600"])
    with Path(file).open("a") as out:
        out.write(f"{os.getpid()} {helper.pid}\n")
    app = create_app(FakeEngineClient(delay=float(delay)), ServerSettings())
    uvicorn.run(app, port=int(port), log_level="error", lifespan="off", ws="none")
