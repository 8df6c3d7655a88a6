"""`appliance serve` whole, with an engine process that has no model: starting, answering, stopping, failing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.client import MemoryUse, ModelInfo
from appliance.settings import Settings
from appliance.startup_display import ready_text
from tests.appliance import echo_engine, tokenizer_files
from tests.fake_client import DETAILS

ROOT = Path(__file__).parents[2]
WAITS_S = 60.0
SERVE = """
import functools, sys
from appliance import cli, serve
serve.LocalClient = functools.partial(serve.LocalClient, engine_command=(sys.executable, {engine!r}, {behaviour!r}))
cli.main(["serve", {folder!r}, "--port", "0", "--no-ui"])
"""
INFO = ModelInfo(
    id="name",
    created=0,
    architecture="LlamaForCausalLM",
    format="GPTQ 4-bit, group 128",
    bits=4,
    kernels=("one", "two"),
    dtype="bfloat16",
    device="cpu",
    max_model_len=1000,
    vocab_size=10,
    num_kv_blocks=187,
    block_size=16,
    num_contexts=2,
    has_chat_template=True,
    memory=MemoryUse(24 << 30, others=3 << 30, weights=235 << 20, kv_cache=4 << 30, held=612 << 20),
    warnings=("odd scales",),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tokenizer_files.save_byte_level_bpe(tmp_path / "model", chat_template=tokenizer_files.CHATML)
    (folder / "config.json").write_text("{}")
    return folder


@contextmanager
def serving(folder: Path, behaviour: str) -> Iterator[subprocess.Popen[str]]:
    script = SERVE.format(engine=echo_engine.__file__, behaviour=behaviour, folder=str(folder))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder.parent,
        env=inherited | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    """Where it serves, once it says so."""
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        url = line.split()[1] if line.startswith("  API") else url
        if "Ctrl-C" in line:
            return url
    raise AssertionError("it ended before it was ready")


def ask(url: str, prompt: str) -> str:
    body = json.dumps({"model": "default", "prompt": prompt}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAITS_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_until_a_signal_and_ends_with_0_and_no_word(folder: Path, number: signal.Signals) -> None:
    with serving(folder, "well") as process:
        assert ask(url_of(process), "hello world") == "hello world"
        process.send_signal(number)
        began = time.monotonic()
        _, errors = process.communicate(timeout=WAITS_S)
        assert time.monotonic() - began < 10
        assert process.returncode == 0
        assert all(line.startswith("Starting the engine") for line in errors.splitlines()), errors


def test_it_can_be_stopped_while_the_model_loads(folder: Path) -> None:
    with serving(folder, "late") as process:
        assert process.stderr is not None
        assert "Starting the engine" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=WAITS_S)
        assert (process.returncode, output) == (0, "")
        assert all(line.startswith("Starting the engine") for line in errors.splitlines()), errors


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [("refusing", "the checkpoint is odd: get another one"), ("dying", "engine"), ("broken", "a driver's words")],
)
def test_a_model_that_cannot_be_loaded_is_one_sentence_and_exit_code_3(
    folder: Path, behaviour: str, sentence: str
) -> None:
    with serving(folder, behaviour) as process:
        output, errors = process.communicate(timeout=WAITS_S)
        assert process.returncode == 3
        assert output == ""
        last = errors.splitlines()[-1]
        assert last.startswith("error: ")
        assert sentence in last


def test_the_ready_text_says_how_many_whole_contexts_fit() -> None:
    text = ready_text(INFO, Settings.load({}), 8000)
    assert "http://127.0.0.1:8000/v1" in text
    assert "1000 tokens; 2 contexts of that length fit into the KV cache at once" in text
    assert "GPTQ 4-bit, group 128" in text
    assert "one, two; bfloat16 on cpu" in text
    assert "weights 235 MiB + KV cache 4.0 GiB of 24.0 GiB, of which other programs hold 3.0 GiB" in text
    assert "the engine holds 612 MiB now" in text
    assert "odd scales" in text
    assert text.splitlines()[-1] == "Press Ctrl-C to stop."


def test_the_ready_text_tells_the_verdict_of_the_self_test() -> None:
    text = ready_text(dataclasses.replace(INFO, details=DETAILS), Settings.load({}), 8000)
    assert "passed: the weights of 2 layers look right" in text


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("::1", "http://[::1]:1"), ("box", "http://box:1")],
)
def test_the_ready_text_has_an_address_that_can_be_opened(host: str, url: str) -> None:
    assert f"  chat     {url}\n" in ready_text(INFO, Settings.load({"host": host}), 1)
