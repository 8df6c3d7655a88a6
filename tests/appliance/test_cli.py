"""The command line as a user meets it, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from appliance import __version__
from appliance.settings import Settings

ROOT = Path(__file__).parent.parent.parent
HEAVY = {"torch", "transformers", "gradio", "fastapi", "uvicorn", "numpy", "zmq", "tokenizers", "huggingface_hub"}


def appliance(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
    return subprocess.run(
        [sys.executable, "-m", "appliance", *arguments],
        cwd=cwd,
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version(tmp_path: Path) -> None:
    assert appliance("--version", cwd=tmp_path).stdout == f"appliance {__version__}\n"


def test_no_command_shows_the_help(tmp_path: Path) -> None:
    result = appliance(cwd=tmp_path)
    assert result.returncode == 0
    assert "Usage: appliance" in result.stdout


def test_every_setting_has_a_flag_except_secrets(tmp_path: Path) -> None:
    result = appliance("serve", "--help", cwd=tmp_path)
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    for name, field in Settings.model_fields.items():
        if name != "api_key":
            assert name == "model" or f"--{name.replace('_', '-')} " in text
            assert field.description is not None
            assert field.description in text
    assert "--api-key" not in text
    assert "Default: 127.0.0.1." in text


@pytest.mark.parametrize("command", ["serve", "quantize"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        "from appliance.cli import app\n"
        f"app(['{command}', '--help'], standalone_mode=False)\n"
        "print(sorted(m for m in sys.modules if '.' not in m), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert HEAVY.isdisjoint(eval(result.stderr)), "the help became slow"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--port", "http"], "port 'http' from --port is not valid: input should be a valid integer"),
        (["serve", "--prot", "1"], "No such option: --prot"),
        (["sreve"], "No such command 'sreve'"),
        (["serve", "no such model"], "/no such model does not exist: MODEL is a folder with config.json"),
        (["serve", "--host", "0.0.0.0"], "host 0.0.0.0 lets other machines use this server and there is no API key"),
        (["quantize", "model", "--out", "out", "--bits", "3"], "--bits 3 is not possible with --method awq: use 4"),
        (["quantize", "no such model", "--out", "out"], "/no such model does not exist: MODEL is a folder with config"),
        (["serve", "--host", "203.0.113.1", "--no-auth"], "host '203.0.113.1' is no address of this machine"),
    ],
)
def test_a_usage_error_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    result = appliance(*arguments, cwd=tmp_path, APPLIANCE_PORT="0")
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert sentence in last
    assert "Traceback" not in result.stderr
    assert result.returncode == 2


def test_a_port_in_use_is_found_before_the_model_is_looked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = appliance("serve", "no such model", "--port", str(port), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: port {port} of 127.0.0.1 is in use: ")
    assert f"--port {port + 1}" in result.stderr


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    result = appliance("serve", "--log-level", "debug", "no such model", "--port", "0", cwd=tmp_path)
    assert "Traceback" in result.stderr
    assert "does not exist: MODEL is a folder" in result.stderr
