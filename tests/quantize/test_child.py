"""A job in another process: its result, its reasons for failing, and its end together with ours."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.errors import QuantizationError
from appliance.quantize.child import run_child
from appliance.quantize.run import _WORKER


def child(code: str, log: Path, seen: list[tuple[str, float]] | None = None) -> object:
    imports = "import json, os, sys, time\njob = json.loads(sys.stdin.readline())\n"
    return run_child(
        [sys.executable, "-c", imports + code], {"x": 3}, log, lambda *p: None if seen is None else seen.append(p)
    )


def test_the_result_comes_after_the_progress(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    code = "print(json.dumps({'progress': ['Half', 0.5]}))\nprint(json.dumps({'result': job['x'] + 1}))"
    assert child(code, tmp_path / "log", seen) == 4
    assert seen == [("Half", 0.5)]
    assert not (tmp_path / "log").exists()


def test_an_error_of_its_own_is_the_sentence_shown(tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=r"^no such thing$"):
        child("print(json.dumps({'error': 'no such thing'}))", tmp_path / "log")
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("raise ValueError('the weights are odd')", "failed: ValueError: the weights are odd (the whole output is in"),
        ("sys.exit(9)", "failed: it ended with 9 (the whole output is in"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9, perhaps for lack of memory"),
    ],
)
def test_an_end_without_a_result_says_why_and_keeps_the_log(tmp_path: Path, code: str, sentence: str) -> None:
    with pytest.raises(QuantizationError) as caught:
        child(code, tmp_path / "log")
    assert sentence in caught.value.message
    assert (tmp_path / "log").exists()


def test_it_is_ended_when_we_are_interrupted(tmp_path: Path) -> None:
    code = "print(json.dumps({'progress': [str(os.getpid()), 0]}), flush=True)\ntime.sleep(60)"
    processes = []

    def interrupt(process: str, fraction: float) -> None:
        processes.append(int(process))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", f"import json, os, sys, time\n{code}"], {}, tmp_path / "log", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(processes[0], 0)
    assert not (tmp_path / "log").exists()


def test_the_worker_ends_when_its_parent_does(tmp_path: Path) -> None:
    """Its stdin closes then. What it imports to load a model sleeps."""
    (tmp_path / "transformers.py").write_text("import time\ntime.sleep(60)")
    (tmp_path / "torch.py").touch()
    code = (
        f"import runpy, sys\nsys.path.insert(0, {str(tmp_path)!r})\nrunpy.run_path({str(_WORKER)!r}, None, '__main__')"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(b"{}\n")
        worker.stdin.flush()
        assert b"Loading the model" in worker.stdout.readline()
        started = time.monotonic()
        worker.stdin.close()
        assert worker.wait(20) == 1
        assert time.monotonic() - started < 20
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        worker.wait()
        worker.stdout.close()


def test_the_worker_needs_nothing_of_the_appliance() -> None:
    assert "appliance" not in "".join(
        line for line in _WORKER.read_text().splitlines() if line.strip().startswith(("import ", "from "))
    )
