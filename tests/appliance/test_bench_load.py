"""The load generator: what it sends, when, and what it makes of answers, whole ones and broken ones."""

from __future__ import annotations

import socket
import statistics
from itertools import islice, pairwise
from typing import Any

import pytest

from appliance.bench.http import Endpoint
from appliance.bench.load import arrivals, first_model, run_load
from appliance.bench.prompts import Range, prompt_and_length
from appliance.client import EngineState
from appliance.errors import ApplianceError, QueueFullError, UsageError
from tests.appliance.bench_servers import DONE, USAGE, Part, event, load_spec, scripted_server, text
from tests.fake_client import FakeEngineClient
from tests.server.support import socket_server


def endpoint_of(port: int) -> Endpoint:
    return Endpoint.parse(f"http://127.0.0.1:{port}/v1/")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_answers_are_counted_as_the_server_counts_them(api: str, stream: bool) -> None:
    client = FakeEngineClient([["One", " two", " three", " four"]])
    with socket_server(client) as port:
        run = await run_load(endpoint_of(port), load_spec(api=api, stream=stream, concurrency=2))
    assert [answer.index for answer in run.answers] == [0, 1, 2, 3]
    for answer, submitted in zip(run.answers, sorted(client.submitted, key=lambda r: r.prompt), strict=False):
        assert answer.error == ""
        assert answer.text == "One two three four"
        assert answer.output_tokens == 4
        assert answer.prompt_tokens > len(submitted.prompt.split())
        assert len(answer.arrivals) == (4 if stream else 0)
        assert answer.due <= min(answer.arrivals, default=answer.ended) <= answer.ended <= run.duration_s
    assert {request.params.max_tokens for request in client.submitted} == {4}
    assert all(request.params.ignore_eos and request.params.is_greedy for request in client.submitted)
    assert client.aborted == []


async def test_times_are_those_of_the_pieces() -> None:
    def script(_: dict[str, Any]) -> tuple[int, list[Part]]:
        # The last event is cut in two: it arrives with its second part.
        return 200, [0.2, text("a"), 0.1, text("b"), 0.1, text("c")[:-9], 0.2, text("c")[-9:] + USAGE, 0.1, DONE]

    with scripted_server(script) as (endpoint, _):
        run = await run_load(endpoint, load_spec(num_requests=1))
    [answer] = run.answers
    found = [when - answer.due for when in (*answer.arrivals, answer.ended)]
    for seconds, slept in zip(found, [0.2, 0.3, 0.6, 0.7], strict=True):
        assert slept <= seconds < slept + 0.5
    assert (answer.prompt_tokens, answer.output_tokens) == (10, 3)


async def test_a_role_is_no_text() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    with scripted_server(lambda _: (200, [role, 0.2, text("a"), USAGE, DONE])) as (endpoint, _):
        run = await run_load(endpoint, load_spec(num_requests=1))
    assert run.answers[0].arrivals[0] - run.answers[0].due >= 0.2


@pytest.mark.parametrize(
    ("status", "parts", "error"),
    [
        (503, [b'{"error": {"message": "m", "code": "model_loading"}}'], "503 model_loading"),
        (404, [b'{"error": {"message": "m", "type": "NotFoundError", "code": 404}}'], "404"),
        (500, [b"<html>"], "500"),
        (200, [text("a"), event({"error": {"message": "m", "code": "engine_dead"}}), DONE], "stream engine_dead"),
        (200, [text("a"), b"data: {broken\n\n", DONE], "stream"),
        (200, [text("a"), USAGE], "incomplete"),
        (200, [text("a"), DONE], "no usage"),
        (200, [text("a"), 0.5, USAGE, DONE], "timeout"),
    ],
)
async def test_a_failure_is_counted_under_its_name(status: int, parts: list[Part], error: str) -> None:
    with scripted_server(lambda _: (status, parts)) as (endpoint, _):
        run = await run_load(endpoint, load_spec(num_requests=2, timeout_s=0.3))
    assert [answer.error for answer in run.answers] == [error, error]


async def test_a_server_that_is_gone_is_an_error_of_each_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    run = await run_load(endpoint_of(port), load_spec())
    assert [answer.error for answer in run.answers] == ["connection"] * 4


async def test_a_full_queue_is_counted_by_the_servers_own_code() -> None:
    client = FakeEngineClient()
    client.refuse_with = QueueFullError("full")
    with socket_server(client) as port:
        run = await run_load(endpoint_of(port), load_spec())
    assert [answer.error for answer in run.answers] == ["429 queue_full"] * 4


async def test_warm_up_is_sent_and_not_counted() -> None:
    client = FakeEngineClient()
    with socket_server(client) as port:
        run = await run_load(endpoint_of(port), load_spec(warmup=3))
    assert len(client.submitted) == 7
    assert len(run.answers) == 4
    assert len({request.prompt for request in client.submitted}) == 7


async def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    with socket_server(FakeEngineClient(delay=0.02)) as port:
        run = await run_load(endpoint_of(port), load_spec(concurrency=4, num_requests=16))
    in_flight = [sum(o.due <= answer.due < o.ended for o in run.answers) for answer in run.answers]
    assert max(in_flight) == 4
    assert all(number == 4 for number in in_flight[4:]), "an answer is followed by the next request at once"


async def test_a_duration_ends_the_sending_and_waits_for_what_runs() -> None:
    client = FakeEngineClient(delay=0.05)
    with socket_server(client) as port:
        run = await run_load(endpoint_of(port), load_spec(num_requests=None, duration_s=0.3))
    assert run.answers[-1].due < 0.3 <= run.duration_s
    assert all(answer.error == "" for answer in run.answers)
    assert client.aborted == []


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    client = FakeEngineClient(delay=0.1)
    with socket_server(client) as port:
        run = await run_load(endpoint_of(port), load_spec(concurrency=None, rate=100.0, num_requests=20))
    assert [answer.due for answer in run.answers] == list(islice(arrivals(0, 100.0), 20))
    assert run.answers[-1].due < min(answer.ended for answer in run.answers)
    assert {answer.error for answer in run.answers} == {""}


def test_arrivals_are_poisson() -> None:
    times = list(islice(arrivals(7, 50.0), 20_000))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.03)
    counts = [0] * int(times[-1])
    for when in times:
        if when < len(counts):
            counts[int(when)] += 1
    assert statistics.variance(counts) == pytest.approx(50, rel=0.25), "counts a second vary as their mean"
    assert times == list(islice(arrivals(7, 50.0), 20_000))
    assert times[:9] != list(islice(arrivals(8, 50.0), 9))


def test_prompts_share_no_beginning() -> None:
    lengths = Range(30, 90), Range(4, 8)
    made = [prompt_and_length(seed, index, *lengths) for seed in (1, 2) for index in range(-4, 500)]
    beginnings = {tuple(prompt.split()[:12]) for prompt, _ in made}
    assert len(beginnings) == len(made)
    assert {len(prompt.split()) for prompt, _ in made} == set(range(30, 91))
    assert {length for _, length in made} == {4, 5, 6, 7, 8}
    assert prompt_and_length(2, 3, *lengths) == prompt_and_length(2, 3, *lengths)


@pytest.mark.parametrize("text", ["", "0", "-5", "9-8", "1.5", "many", "3-"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt-words"):
        Range.parse(text, "--prompt-words")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="http://127"):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 1.0},
        {"concurrency": None},
        {"duration_s": 1.0},
        {"num_requests": None},
        {"concurrency": 0},
        {"api": "x"},
    ],
)
def test_a_load_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_spec(**changes)


async def test_the_model_is_the_first_that_is_listed() -> None:
    with socket_server(FakeEngineClient(model_id="a/model")) as port:
        assert await first_model(endpoint_of(port)) == "a/model"
    with pytest.raises(ApplianceError, match="no server answers at http"):
        await first_model(endpoint_of(port))


async def test_a_server_that_loads_lists_no_model() -> None:
    with (
        socket_server(FakeEngineClient(state=EngineState.LOADING)) as port,
        pytest.raises(ApplianceError, match="names no model: name one with --model"),
    ):
        await first_model(endpoint_of(port))


async def test_an_api_key_is_sent() -> None:
    with scripted_server(lambda _: (200, [text("a"), USAGE, DONE])) as (endpoint, bodies):
        with_key = Endpoint.parse(f"http://127.0.0.1:{endpoint.port}/prefix/v1", "secret")
        await run_load(with_key, load_spec(num_requests=1))
    assert bodies[0]["authorization"] == "Bearer secret"
    assert bodies[0]["path"] == "/prefix/v1/chat/completions"
