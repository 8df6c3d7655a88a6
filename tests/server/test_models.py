"""GET /v1/models and paths without a route."""

from __future__ import annotations

import dataclasses

import pytest
from fastapi import FastAPI
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope, Send

from appliance.client import EngineState
from appliance.model_details import SelfTest, Verdict
from appliance.server.app import create_app
from appliance.server.settings import ServerSettings
from tests.fake_client import DETAILS, FakeEngineClient
from tests.server.support import answers_normally, in_process, reach


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/", "/v1//models", "/v1/models?client_version=1"])
async def test_the_model_is_listed_under_every_spelling(path: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.get(path)
    assert response.status_code == 200
    (entry,) = response.json()["data"]
    assert (entry["id"], entry["object"], entry["owned_by"]) == ("fake/model-4bit", "model", "appliance")
    assert entry["max_model_len"] == entry["context_length"] == 4096
    assert entry["status"] == {"value": "loaded"}


@pytest.mark.parametrize("name", ["fake/model-4bit", "default", "other"])
async def test_one_model_is_found_by_its_names_with_slashes(name: str) -> None:
    async with in_process(FakeEngineClient(), model_aliases=("other",)) as http:
        response = await http.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["id"]) == (200, "fake/model-4bit")
        response = await http.get("/v1/models/nothing/here")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_one_model_is_described_in_all_details_and_the_list_stays_short() -> None:
    failed = SelfTest(Verdict.FAILED, "up is damaged", ("up: its scales hold NaN or infinity",))
    client = FakeEngineClient(details=dataclasses.replace(DETAILS, self_test=failed))
    client.info = dataclasses.replace(client.info, warnings=("This model failed its self-test.",))
    async with in_process(client) as http:
        entry = (await http.get("/v1/models/default")).json()
        (listed,) = (await http.get("/v1/models")).json()["data"]
    assert entry["details"]["self_test"]["verdict"] == "failed"
    assert entry["details"]["self_test"]["faults"] == ["up: its scales hold NaN or infinity"]
    assert entry["details"]["layers"][0]["refused"] == [
        {"kernel": "other", "reason": "needs an NVIDIA card, found cpu"}
    ]
    assert set(entry["details"]) == {field.name for field in dataclasses.fields(DETAILS)}
    assert "details" not in listed
    assert listed["warnings"] == ["This model failed its self-test."]


async def test_models_answer_during_a_load() -> None:
    client = FakeEngineClient(state=EngineState.LOADING)
    async with in_process(client) as http:
        response = await http.get("/v1/models")
        assert (response.status_code, response.json()["data"]) == (200, [])
    async with in_process(client, model_name="soon") as http:
        (entry,) = (await http.get("/v1/models")).json()["data"]
        assert (entry["id"], entry["status"]) == ("soon", {"value": "loading"})


@pytest.mark.parametrize("path", ["/v1/models", "/models/default", "/health", "/version", "/metrics"])
async def test_head_is_answered(path: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        assert (await http.head(path)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/api/tags"]
)
async def test_endpoints_of_later_versions_say_so(path: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.post(path, json={})
        assert response.status_code == 404
        assert "not served in this version" in response.json()["error"]["message"]
        assert await answers_normally(http)


def app_with_page() -> FastAPI:
    """An application with a user interface that answers everything it is asked."""

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await HTMLResponse(f"page {scope['path']}")(scope, receive, send)

    app = create_app(FakeEngineClient(), ServerSettings())
    app.mount("/", page)
    return app


@pytest.mark.parametrize("path", ["/v1", "/v1/xyz", "/v1/chat", "/api/nothing", "/health/x", "/chat", "/embeddings"])
async def test_unknown_api_paths_are_json_404_even_beside_a_page(path: str) -> None:
    async with reach(app_with_page()) as http:
        response = await http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
    ],
)
async def test_wrong_methods_are_json_405_even_beside_a_page(method: str, path: str, allowed: str) -> None:
    async with reach(app_with_page()) as http:
        response = await http.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/", "/gradio_api//x/", "/v1x"])
async def test_other_paths_reach_the_page_unchanged(path: str) -> None:
    async with reach(app_with_page()) as http:
        response = await http.get(path)
    assert (response.status_code, response.text) == (200, f"page {path}")


@pytest.mark.parametrize("path", ["/", "/nothing", "/docs", "/openapi.json"])
async def test_without_a_page_every_unknown_path_is_json_404(path: str) -> None:
    async with in_process(FakeEngineClient()) as http:
        response = await http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
