from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from appliance.client import EngineState
from appliance.ui.app import build_ui, mount_ui
from appliance.ui.guard import QUEUE_SETTINGS, calm_queue
from appliance.ui.status import is_settling, status_html
from tests.fake_client import FakeEngineClient


@pytest.fixture(scope="module")
def app() -> FastAPI:
    async def build() -> FastAPI:
        # Inside a running loop, for Gradio makes and forgets event loops elsewhere.
        app = FastAPI()

        @app.get("/health")
        async def health() -> dict[str, str]:
            return {"state": "ready"}

        return mount_ui(app, FakeEngineClient())

    return asyncio.run(build())


async def get(app: FastAPI, path: str, method: str = "GET") -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.request(method, path)


async def test_the_page_is_served_with_headers_that_keep_it_to_its_origin(app: FastAPI) -> None:
    page = await get(app, "/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    for directive in ("connect-src 'self'", "img-src 'self' data: blob:", "frame-ancestors 'none'"):
        assert directive in policy
    assert "unsafe-eval" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"


async def test_routes_registered_before_the_mount_stay_reachable(app: FastAPI) -> None:
    response = await get(app, "/health")
    assert response.json() == {"state": "ready"}
    assert "content-security-policy" not in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=http://example.org/a.png",
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/proxy=http://example.org/",
        "/gradio_api/info",
        "/gradio_api/run-history/records",
        "/gradio_api/openapi.json",
        "/gradio_api/vibe-code",
    ],
)
async def test_what_the_page_does_not_ask_for_is_not_there(app: FastAPI, path: str) -> None:
    assert (await get(app, path)).status_code == 404


@pytest.mark.parametrize("path", ["/gradio_api/upload", "/gradio_api/component_server", "/gradio_api/call/send"])
async def test_what_the_page_does_not_post_is_refused(app: FastAPI, path: str) -> None:
    assert (await get(app, path, "POST")).status_code == 404


async def test_no_event_is_a_second_api() -> None:
    page = build_ui(FakeEngineClient())
    config = page.get_config_file()
    assert {event["api_visibility"] for event in config["dependencies"]} == {"private"}
    assert page.api_open is False
    assert page.analytics_enabled is False


async def test_no_answer_waits_for_another_page() -> None:
    page = build_ui(FakeEngineClient())
    limits = {fn.name: fn.concurrency_limit for fn in page.fns.values() if fn.queue}
    assert limits["send"] is None
    assert limits["retry"] is None
    assert page._queue.max_size


async def test_this_gradio_has_every_queue_setting() -> None:
    """Fails when an upgrade renames what keeps an idle process under 1 % of a core."""
    page = build_ui(FakeEngineClient())
    assert calm_queue(page) == []
    for name, value in QUEUE_SETTINGS.items():
        assert getattr(page._queue, name) == value


def test_a_renamed_queue_setting_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    queue = SimpleNamespace(sleep_when_free=0.001)
    missing = calm_queue(SimpleNamespace(_queue=queue))  # type: ignore[arg-type]
    assert queue.sleep_when_free == QUEUE_SETTINGS["sleep_when_free"]
    assert missing == ["progress_update_sleep_when_free", "max_thread_count"]
    assert len(caplog.records) == 1


def test_the_users_shell_cannot_open_the_page() -> None:
    risky = {
        "GRADIO_SHARE": "1",
        "GRADIO_ALLOWED_PATHS": "/",
        "GRADIO_MCP_SERVER": "1",
        "GRADIO_ANALYTICS_ENABLED": "1",
    }
    code = "import os, appliance.ui; print([os.environ.get(n) for n in ('" + "','".join(risky) + "')])"
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | risky, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[None, None, None, 'False']"


def test_the_status_line_tells_model_and_state() -> None:
    client = FakeEngineClient(model_id="org/<model>")
    line = status_html(client)
    for fact in ("org/&lt;model&gt;", "GPTQ 4-bit, group 128", "kernel fake", "4,096 tokens of context", "Ready"):
        assert fact in line


@pytest.mark.parametrize(
    ("state", "words", "settling"),
    [
        (EngineState.LOADING, "Loading the model: 3 of 7 GB", True),
        (EngineState.RESTARTING, "Restarting the engine: 3 of 7 GB", True),
        (EngineState.FAILED, "The engine has failed: 3 of 7 GB", False),
        (EngineState.STOPPED, "Stopped: 3 of 7 GB", False),
    ],
)
def test_every_state_has_words(state: EngineState, words: str, settling: bool) -> None:
    client = FakeEngineClient(state=state)
    client.detail = "3 of 7 GB"
    assert words in status_html(client)
    assert is_settling(client.health) is settling
