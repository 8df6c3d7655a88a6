"""The middleware: Host, Origin, CORS, keys, request ids."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from starlette.types import Message

from appliance.errors import UsageError
from appliance.server.app import create_app
from appliance.server.settings import ServerSettings, is_loopback_host
from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, answers_normally, in_process

LOCAL_HOSTS = [
    "localhost",
    "localhost:8000",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]:8000",
    "app.localhost:1",
    "LOCALHOST",
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.5",
    "",
]


@pytest.mark.parametrize("host", LOCAL_HOSTS)
async def test_local_host_names_are_answered(host: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing"])
@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_foreign_host_names_are_403_everywhere_on_loopback(host: str, path: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.get(path, headers={"host": host})
        assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")
        assert await answers_normally(http)


async def test_configured_host_names_are_answered() -> None:
    async with in_process(FakeEngineClient(), allowed_hosts=("Box.lan",)) as http:
        assert (await http.get("/health", headers={"host": "box.lan:8000"})).status_code == 200
        assert (await http.get("/health", headers={"host": "other.lan"})).status_code == 403
    async with in_process(FakeEngineClient(), host="0.0.0.0") as http:
        assert (await http.get("/health", headers={"host": "anything.lan"})).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://127.0.0.1",
        "http://[::1]:5173",
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://abc",
        "https://chat.example",
        "chrome-extension://abcdef",
    ],
)
async def test_allowed_origins_get_cors_headers(origin: str) -> None:
    settings = {"allowed_origins": ("https://chat.example", "chrome-extension://*")}
    async with in_process(FakeEngineClient(), **settings) as http:
        body = {"messages": QUESTION}
        response = await http.post("/v1/chat/completions", json=body, headers={"origin": origin})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in response.headers
        error = await http.post("/v1/chat/completions", json={}, headers={"origin": origin})
        assert (error.status_code, error.headers["access-control-allow-origin"]) == (400, origin)


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "https://evil.example",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "file://",
        "",
        "http://[::1",
        "https://chat.example.evil",
        "chrome-extension://other",
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/")])
async def test_foreign_origins_are_403_without_cors_headers(origin: str, method: str, path: str) -> None:
    client = FakeEngineClient()
    async with in_process(client, allowed_origins=("https://chat.example",)) as http:
        response = await http.request(method, path, json={"messages": QUESTION}, headers={"origin": origin})
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
        assert client.submitted == []
        assert await answers_normally(http)


async def test_pages_of_this_server_reach_all_of_it_and_neighbours_only_the_api() -> None:
    async with in_process(FakeEngineClient()) as http:
        own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
        assert (await http.get("/page", headers=own)).status_code == 404
        neighbour = own | {"origin": "http://localhost:3000"}
        assert (await http.get("/page", headers=neighbour)).status_code == 403
        assert (await http.get("/v1/models", headers=neighbour)).status_code == 200


async def test_requests_from_another_sites_page_are_refused_without_an_origin_too() -> None:
    async with in_process(FakeEngineClient()) as http:
        image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert (await http.get("/v1/models", headers=image)).status_code == 403
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await http.get("/v1/models", headers=link)).status_code == 200


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


async def test_preflight_reflects_the_headers_and_needs_no_key() -> None:
    async with in_process(FakeEngineClient(), api_keys=("secret",)) as http:
        headers = PREFLIGHT | {"origin": "app://obsidian.md"}
        response = await http.options("/v1/chat/completions", headers=headers)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == "app://obsidian.md"
        assert response.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "access-control-allow-private-network" not in response.headers
        headers["access-control-request-private-network"] = "true"
        response = await http.options("/v1/chat/completions", headers=headers)
        assert response.headers["access-control-allow-private-network"] == "true"


async def test_preflight_of_a_foreign_origin_is_403() -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.options("/v1/models", headers=PREFLIGHT | {"origin": "https://evil.example"})
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]


BASIC = "Basic " + base64.b64encode(b"anyone:s\xc3\xa9cret").decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "second"},
        {"api-key": "second"},
        {"authorization": "Bearer second"},
        {"authorization": "bearer  second"},
        {"authorization": BASIC},
        {"authorization": b"Bearer s\xc3\xa9cret"},
        {"authorization": "Bearer no", "api-key": "second"},
    ],
)
async def test_any_key_in_any_usual_place_opens(headers: Any) -> None:
    async with in_process(FakeEngineClient(), api_keys=("sécret", "second")) as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "secret"},
        {"x-api-key": ""},
        {"authorization": "Basic !!!"},
        {"authorization": "Basic c2VjcmV0"},
    ],
)
async def test_without_a_valid_key_everything_but_health_is_401(headers: dict[str, str]) -> None:
    async with in_process(FakeEngineClient(), api_keys=("secret",)) as http:
        for path in ["/v1/models", "/metrics", "/version", "/v1/nothing", "/v1/chat/completions"]:
            response = await http.get(path, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        page = await http.get("/", headers=headers)
        assert (page.status_code, page.headers["www-authenticate"]) == (401, 'Basic realm="appliance"')
        assert (await http.get("/health", headers=headers)).status_code == 200


async def test_any_key_is_taken_when_none_is_configured() -> None:
    async with in_process(FakeEngineClient()) as http:
        assert (await http.get("/v1/models", headers={"authorization": "Bearer whatever"})).status_code == 200


async def test_request_ids_are_echoed_or_made() -> None:
    async with in_process(FakeEngineClient()) as http:
        assert (await http.get("/health", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        made = (await http.get("/health", headers={"x-request-id": "a b\t"})).headers["x-request-id"]
        assert made != (await http.get("/health")).headers["x-request-id"]
        assert made.isalnum()


@pytest.mark.parametrize(
    ("headers", "opened"),
    [
        ({b"host": b"127.0.0.1:8000"}, True),
        ({b"host": b"127.0.0.1:8000", b"origin": b"http://127.0.0.1:8000"}, True),
        ({b"host": b"evil.example"}, False),
        ({b"host": b"127.0.0.1:8000", b"origin": b"https://evil.example"}, False),
    ],
)
async def test_websockets_obey_the_same_rules(headers: dict[bytes, bytes], opened: bool) -> None:
    reached = False
    sent: list[Message] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        nonlocal reached
        reached = True

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    app = create_app(FakeEngineClient(), ServerSettings())
    app.mount("/", page)
    scope = {"type": "websocket", "path": "/socket", "headers": list(headers.items()), "query_string": b""}
    await app(scope | {"root_path": "", "scheme": "ws", "subprotocols": [], "extensions": {}}, receive, send)
    assert reached is opened
    assert opened or sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1", "localhost", "a.localhost"])
def test_loopback_names_are_known(host: str) -> None:
    assert is_loopback_host(host)
    assert not is_loopback_host(host + ".example")


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70_000},
        {"max_body_bytes": 1},
        {"keepalive_s": 0},
        {"api_keys": ("a", " ")},
        {"allowed_origins": ("*",)},
    ],
)
def test_bad_settings_are_usage_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerSettings(**settings)
