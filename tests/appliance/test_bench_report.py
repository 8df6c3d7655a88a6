"""From answers to numbers, files and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.bench.load import Answer, Run
from appliance.bench.report import Report, Spread, differing_answers, save_answers
from appliance.errors import UsageError
from tests.appliance.bench_servers import DONE, USAGE, load_spec, scripted_server, text
from tests.fake_client import FakeEngineClient
from tests.server.support import socket_server

ROOT = Path(__file__).parent.parent.parent


def test_percentiles_of_known_values() -> None:
    spread = Spread.of([float(value) for value in range(101)])
    assert spread is not None
    assert (spread.count, spread.mean, spread.max) == (101, 50, 100)
    assert (spread.p50, spread.p90, spread.p95, spread.p99) == (50, 90, 95, 99)
    pair = Spread.of([2.0, 4.0])
    assert pair is not None
    assert (pair.p50, pair.p90, pair.p99) == pytest.approx((3.0, 3.8, 3.98))
    assert Spread.of([]) is None


def answer(index: int, due: float, arrivals: tuple[float, ...], ended: float, **more: Any) -> Answer:
    return Answer(index, due, ended, prompt_tokens=10, output_tokens=5, arrivals=arrivals, **more)


RUN = Run(
    (
        answer(0, 0.0, (1.0, 1.5, 3.0), 3.5, text="abc"),
        answer(1, 1.0, (1.5, 2.0, 3.5), 4.0, text="def"),
        Answer(2, 0.0, 5.0, "503 model_loading"),
        Answer(3, 0.0, 5.0, "connection"),
        Answer(4, 0.0, 5.0, "503 model_loading"),
    ),
    duration_s=5.0,
)


def test_rates_and_latencies_of_a_known_run() -> None:
    report = Report.of(RUN)
    assert report.num_ok == 2
    assert report.errors == {"503 model_loading": 2, "connection": 1}
    assert (report.requests_per_s, report.input_tokens_per_s, report.output_tokens_per_s) == (0.4, 4.0, 2.0)
    assert report.ttft is not None
    assert (report.ttft.mean, report.ttft.max) == (0.75, 1.0)
    assert report.tpot is not None
    assert (report.tpot.count, report.tpot.mean) == (2, 0.5)  # 2 s over the 4 tokens after the first
    assert report.itl is not None
    assert (report.itl.count, report.itl.mean, report.itl.max) == (4, 1.0, 1.5)
    assert report.e2e is not None
    assert (report.e2e.mean, report.e2e.max) == (3.25, 3.5)


def test_without_streaming_only_the_end_is_known() -> None:
    report = Report.of(Run((answer(0, 0.0, (), 2.0),), 2.0))
    assert (report.ttft, report.tpot, report.itl) == (None, None, None)
    assert report.e2e is not None
    assert report.e2e.p50 == 2.0


def test_a_run_without_answers_has_rates_of_zero() -> None:
    report = Report.of(Run((), 0.0))
    assert (report.num_ok, report.requests_per_s, report.e2e) == (0, 0, None)


def test_saved_answers_are_compared_by_prompt(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    spec = load_spec()
    save_answers(first, spec, RUN.answers)
    save_answers(second, spec, reversed(RUN.answers[1:]))
    assert differing_answers(first, second) == (4, [])
    save_answers(second, spec, [answer(1, 0.0, (), 1.0, text="other"), RUN.answers[0]])
    assert differing_answers(first, second) == (2, [1])
    save_answers(third, load_spec(seed=5), RUN.answers)
    with pytest.raises(UsageError, match="share no prompt"):
        differing_answers(first, third)
    third.write_text("{}")
    with pytest.raises(UsageError, match="third does not hold answers"):
        differing_answers(first, third)
    with pytest.raises(UsageError, match="could not be read"):
        differing_answers(first, tmp_path / "nothing")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_the_last_line_is_one_json_document(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    flags = ["-c", "2", "-n", "5", "--prompt-words", "20-30", "--output-tokens", "4", "--seed", "3"]
    with socket_server(FakeEngineClient(model_id="a/model")) as port:
        url = f"http://127.0.0.1:{port}"
        result = bench("serve", "--base-url", url, *flags, "--json", "--save", str(first))
        bench("serve", "--base-url", url, *flags, "--save", str(second))
    assert result.returncode == 0, result.stderr
    assert "per output token" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["load"]["model"] == "a/model"
    assert document["load"]["prompt_words"] == "20-30"
    assert document["load"]["concurrency"] == 2
    results = document["results"]
    assert (results["num_ok"], results["errors"], results["output_tokens"]) == (5, {}, 20)
    assert set(results["ttft"]) == {"count", "mean", "p50", "p90", "p95", "p99", "max"}
    assert results["tpot"]["count"] == results["e2e"]["count"] == 5

    same = bench("compare", str(first), str(second))
    assert (same.returncode, same.stdout) == (0, "5 of 5 answers are equal.\n")
    second.write_text(second.read_text().replace("Hello", "Hi", 1))
    other = bench("compare", str(first), str(second))
    assert (other.returncode, other.stdout) == (1, "4 of 5 answers are equal.\nDifferent: 0\n")


def test_a_run_without_a_whole_answer_ends_with_one() -> None:
    with scripted_server(lambda body: (500, [b"{}"])) as (endpoint, _):
        result = bench("serve", "--base-url", f"http://127.0.0.1:{endpoint.port}", "-n", "2", "--warmup", "0", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout.splitlines()[-1])["results"]["errors"] == {"500": 2}


def test_an_unreachable_server_is_one_sentence() -> None:
    result = bench("serve", "--base-url", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("error: no server answers at http://127.0.0.1:1 (")
    assert result.stderr.count("\n") == 1


def test_requests_are_sent_without_a_stream_if_so_wished() -> None:
    body = b'{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
    with scripted_server(lambda asked: (200, [text("a"), USAGE, DONE] if asked["stream"] else [body])) as (
        endpoint,
        got,
    ):
        url = f"http://127.0.0.1:{endpoint.port}"
        result = bench("serve", "--base-url", url, "-n", "2", "--no-stream", "--no-ignore-eos", "--warmup", "0")
    assert result.returncode == 0, result.stderr
    assert [asked["stream"] for asked in got] == [False, False]
    assert all("ignore_eos" not in asked and "stream_options" not in asked for asked in got)
