"""The comparison of two servers, on two small ones."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.compare import Peer, main
from tests.server.support import eventually

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def peer(name: str, delay: float, file: Path) -> str:
    command = [sys.executable, "-m", "tests.benchmarks.fake_server", "{port}", str(delay), str(file)]
    return f"{name}={' '.join(command)}"


def runs(process_id: int) -> bool:
    """False for one that has ended and is still to be collected by init."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_servers_are_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick, slow, file = tmp_path / "quick", tmp_path / "slow", tmp_path / "numbers.json"
    load = [
        "--rounds",
        "2",
        "--concurrency",
        "1",
        "3",
        "--num-requests",
        "2",
        "--output-tokens",
        "4",
        "--json",
        str(file),
    ]
    assert main(["--a", peer("quick", 0.02, quick), "--b", peer("slow", 0.2, slow), *load]) == 0

    found = json.loads(file.read_text())
    order = [(run["round"], run["peer"], run["concurrency"]) for run in found["runs"]]
    assert order == [(r, p, c) for r in (0, 1) for p in ("quick", "slow") for c in (1, 3)]
    assert [run["num_ok"] for run in found["runs"]] == [2, 6] * 4
    for row in found["medians"]:
        for key in ("tpot_p50", "ttft_p50"):
            a, b, ratio = row[key]
            assert 0.01 < a < b
            assert b > 0.15
            assert ratio < 0.9
        assert row["output_tokens_per_s"][2] > 1

    text, progress = capsys.readouterr()
    assert "| concurrent requests | measure | quick | slow | ratio |" in text
    assert text.count("\n| 1 |") == text.count("\n| 3 |") == 4
    assert found["machine"] in text
    assert "cores" in found["machine"]
    assert f"- slow: `{found['commands']['slow']}`" in text
    assert "Requests that failed: 0." in text
    assert progress.count("round 2/2") == 4

    started = [int(number) for log in (quick, slow) for number in log.read_text().split()]
    assert len(started) == 8, "each server and its helper, twice"
    eventually(lambda: not any(map(runs, started)))


def test_a_server_that_does_not_come_up_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    broken = shlex.join([sys.executable, "-c", "raise SystemExit('no model here, not even on {port}')"])
    assert main(["--a", f"broken={broken}", "--b", f"other={broken}"]) == 1
    errors = capsys.readouterr().err
    assert "error: broken did not come up" in errors
    assert "no model here" in errors


def test_no_round_is_no_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--a", "a=x {port}", "--b", "b=y {port}", "--rounds", "0"]) == 2
    assert "rounds must be at least 1, found 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["serve --port {port}", "=serve {port}", "name=serve --port 8000"])
def test_a_command_without_name_or_port_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--a", text, "--b", "b=serve {port}"]) == 2
    assert "NAME=COMMAND" in capsys.readouterr().err
    assert Peer.parse("a=b=c {port}") == Peer("a", "b=c {port}")
