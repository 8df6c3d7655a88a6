"""The load that benchmarks make leaves every answer what it is alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.builtin.serving import serving


def bench(*arguments: str) -> str:
    command = [sys.executable, "-m", "appliance", "bench", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_every_answer_of_a_benchmark_equals_the_one_at_a_time_answer(folder: Path, tmp_path: Path) -> None:
    """In the exact mode: 32 requests at 16 at once, cold, against the same ones one by one."""
    with serving(folder, "--dtype", "float32", "--no-ui", "--no-enable-prefix-caching") as server:
        load = ["serve", "--base-url", server.base, "-n", "32", "--prompt-words", "60", "--output-tokens", "16"]
        bench(*load, "--seed", "5", "-c", "16", "--save", str(tmp_path / "together"))
        bench(*load, "--seed", "5", "-c", "1", "--save", str(tmp_path / "alone"))
    same = bench("compare", str(tmp_path / "together"), str(tmp_path / "alone"))
    assert same == "32 of 32 answers are equal.\n"
