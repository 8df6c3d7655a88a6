"""GET /health, /version and /metrics."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance import __version__
from appliance.client import EngineState, Priority
from appliance.sampling_params import SamplingParams
from appliance.server.app import create_app
from appliance.server.settings import ServerSettings
from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, answers_normally, in_process, reach


@pytest.mark.parametrize("state", list(EngineState))
async def test_health_is_200_only_while_requests_are_answered(state: EngineState) -> None:
    client = FakeEngineClient(state=state)
    client.detail = "layer 3 of 40"
    async with in_process(client) as http:
        response = await http.get("/health")
        assert await answers_normally(http) == (response.status_code == 200)
    ready = state is EngineState.READY
    assert response.status_code == (200 if ready else 503)
    assert response.json() == {"status": "ok" if ready else state.value, "detail": "layer 3 of 40"}


async def test_version_is_told() -> None:
    async with in_process(FakeEngineClient()) as http:
        assert (await http.get("/version")).json() == {"version": __version__}


def samples(text: str) -> dict[str, float]:
    """Every sample of an exposition, under its name and labels."""
    return {
        sample.name + "".join(f"|{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_what_happened() -> None:
    client = FakeEngineClient(delay=0.002)
    async with in_process(client) as http:
        asked: list[dict[str, Any]] = [{}, {"max_tokens": 2}, {"stream": True}, {"temperature": "hot"}, {"model": "no"}]
        for fields in asked:
            await http.post("/v1/chat/completions", json={"messages": QUESTION} | fields)
        client.fail_after = 1
        await http.post("/v1/chat/completions", json={"messages": QUESTION})
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(response.text)
    assert found["appliance_request_success_total|stop"] == 2
    assert found["appliance_request_success_total|length"] == 1
    assert found["appliance_request_success_total|error"] == 1
    assert found["appliance_request_rejected_total|invalid_value"] == 1
    assert found["appliance_request_rejected_total|model_not_found"] == 1
    assert found["appliance_time_to_first_token_seconds_count"] == 4
    assert found["appliance_time_per_output_token_seconds_count"] == 3
    assert found["appliance_e2e_request_latency_seconds_count"] == 4
    assert 0.002 <= found["appliance_time_per_output_token_seconds_sum"] / 3 < 0.1
    assert found["appliance_generation_tokens_total"] == 11
    assert found["appliance_prompt_tokens_total"] == 4 * len("<user>Hi\n<assistant>")
    assert found["appliance_requests_running"] == 0
    assert found["appliance_kv_blocks_total"] == found["appliance_kv_blocks_free"] == 4096
    assert found["appliance_kv_cache_usage_ratio"] == 0
    assert found["appliance_model_info|4|GPTQ 4-bit, group 128|fake|fake/model-4bit"] == 1


async def test_metrics_answer_during_a_load_without_a_model() -> None:
    async with in_process(FakeEngineClient(state=EngineState.LOADING, num_kv_blocks=0)) as http:
        response = await http.get("/metrics")
    assert response.status_code == 200
    assert "appliance_model_info{" not in response.text
    assert samples(response.text)["appliance_kv_cache_usage_ratio"] == 0


async def test_requests_of_a_user_interface_are_counted_too() -> None:
    app = create_app(FakeEngineClient(), ServerSettings())
    client = app.state.client
    stream = await client.submit([1], SamplingParams(), priority=Priority.INTERACTIVE)
    assert [output.text async for output in stream][-1] == "!"
    abandoned = await client.submit([1], SamplingParams())
    await abandoned.__anext__()
    await abandoned.aclose()
    await abandoned.aclose()
    async with reach(app) as http:
        found = samples((await http.get("/metrics")).text)
    assert found["appliance_request_success_total|stop"] == 1
    assert found["appliance_request_success_total|abort"] == 1


def test_the_server_loads_no_engine() -> None:
    program = "import sys, appliance.server.app; print({'torch', 'transformers', 'zmq', 'gradio'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"
