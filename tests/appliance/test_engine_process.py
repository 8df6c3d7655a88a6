"""The engine process starts, ends and comes back as it should, whatever kills whom."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from appliance import engine_process
from appliance.client import EngineState, Priority
from appliance.config import EngineConfig
from appliance.engine.messages import Accepted, Add, Refused, Step
from appliance.engine_process import EngineProcess
from appliance.errors import ApplianceError, CheckpointError, EngineDeadError
from appliance.sampling_params import SamplingParams
from tests.appliance import echo_engine

ROOT = Path(__file__).parents[2]
WAITS_S = 20.0


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the socket's folder is made: not in tmp_path, whose name is too long for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


class Engine(EngineProcess):
    """Records what it is told."""

    def __init__(self, folder: Path, behaviour: str = "well") -> None:
        self.messages: list[Accepted | Refused | Step] = []
        self.deaths: list[ApplianceError] = []
        self.progress: list[tuple[str, float]] = []
        super().__init__(
            EngineConfig(model=str(folder / "model")),
            on_message=self.messages.append,
            on_death=self.deaths.append,
            on_progress=lambda stage, fraction: self.progress.append((stage, fraction)),
            command=(sys.executable, echo_engine.__file__, behaviour),
        )

    def ask(self, *prompt: int) -> None:
        self.send(Add("r", list(prompt), SamplingParams(max_tokens=3), Priority.NORMAL))

    @property
    def answer(self) -> list[int]:
        steps = [message for message in self.messages if isinstance(message, Step)]
        return [token for step in steps for output in step.outputs for token in output.token_ids]


@asynccontextmanager
async def running(folder: Path, behaviour: str = "well") -> AsyncIterator[Engine]:
    engine = Engine(folder, behaviour)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAITS_S):
        while not condition():
            await asyncio.sleep(0.005)


def is_alive(process_id: int) -> bool:
    """A zombie is dead: who reads its exit status is not our business."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def test_a_request_is_accepted_before_its_first_token(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        assert engine.health.state is EngineState.READY
        assert engine.progress == [("loading", 0.5)]
        engine.ask(1, 2, 3)
        await until(lambda: len(engine.answer) == 3)
        assert engine.answer == [1, 2, 3]
        assert engine.messages[0] == Accepted("r")
        assert not isinstance(engine.messages[1], Accepted)


async def test_stopping_leaves_no_process_and_no_folder(tmp_path: Path, sockets: Path) -> None:
    async with running(tmp_path) as engine:
        process_id = engine.process_id
        assert process_id is not None
        (folder,) = sockets.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        engine.ask(echo_engine.WAIT)
    assert not is_alive(process_id)
    assert list(sockets.iterdir()) == []
    assert engine.health.state is EngineState.STOPPED
    assert [type(error) for error in engine.deaths] == [EngineDeadError]
    with pytest.raises(EngineDeadError, match="stopped"):
        engine.ask(1)
    await engine.stop()


async def test_stopping_ends_an_engine_that_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_GRACE_S", 0.1)
    async with running(tmp_path) as engine:
        process_id = engine.process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
    assert not is_alive(process_id)


async def test_stopping_does_not_wait_for_the_load(tmp_path: Path, sockets: Path) -> None:
    engine = Engine(tmp_path, "late")
    start = asyncio.create_task(engine.start())
    await until(lambda: engine.progress)
    process_id = engine.process_id
    assert process_id is not None
    assert engine.health.detail == "loading, 50%"
    started = time.monotonic()
    await engine.stop()
    assert time.monotonic() - started < 2
    assert not is_alive(process_id)
    assert list(sockets.iterdir()) == []
    with pytest.raises(EngineDeadError, match="stopped"):
        await start


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_killed_engine_comes_back(tmp_path: Path, kill: signal.Signals) -> None:
    async with running(tmp_path) as engine:
        first = engine.process_id
        assert first is not None
        os.kill(first, kill)
        await until(lambda: engine.deaths)
        assert engine.health.state is EngineState.RESTARTING
        assert kill.name in engine.health.detail
        with pytest.raises(EngineDeadError, match="being restarted"):
            engine.ask(1)
        await until(lambda: engine.health.state is EngineState.READY)
        assert engine.process_id != first
        assert engine.num_restarts == 1
        engine.ask(4, 5, 6)
        await until(lambda: len(engine.answer) == 3)


async def test_ctrl_c_is_left_to_the_parent(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGINT)
        engine.ask(1, 2, 3)
        await until(lambda: len(engine.answer) == 3)
        assert engine.deaths == []


@pytest.mark.parametrize(
    ("behaviour", "error", "text"),
    [
        ("refusing", CheckpointError, r"^the checkpoint is odd: get another one$"),
        ("broken", ApplianceError, r"could not be loaded \(ValueError: a driver's words\)"),
        ("dying", EngineDeadError, r"ended with status 9"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_final(
    tmp_path: Path, behaviour: str, error: type[ApplianceError], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(tmp_path, behaviour)
    with pytest.raises(error, match=text):
        await engine.start()
    assert engine.health.state is EngineState.FAILED
    assert engine.num_restarts == 0
    assert engine.process_id is None
    assert ("Traceback" in capfd.readouterr().err) == (behaviour == "broken")
    await engine.stop()
    assert engine.health.state is EngineState.FAILED


async def test_an_engine_that_cannot_come_back_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(engine_process, "MAX_DEATHS", 3)
    async with running(tmp_path, "once") as engine:
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        await until(lambda: engine.health.state is EngineState.FAILED)
        assert "status 9" in engine.health.detail
        assert engine.num_restarts == 2


async def test_a_fault_of_the_receiver_is_no_healthy_engine(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        engine._on_message = lambda message: 1 / 0  # type: ignore[assignment]
        process_id = engine.process_id
        assert process_id is not None
        engine.ask(1)
        await until(lambda: engine.health.state is EngineState.FAILED)
        await until(lambda: engine.deaths)
        assert "ZeroDivisionError" in engine.health.detail
        assert not is_alive(process_id)


def test_the_engine_ends_with_its_parent(tmp_path: Path, sockets: Path) -> None:
    """Killed outright, a parent can say nothing: the closing pipe does."""
    parent = f"""
import asyncio, pathlib
from tests.appliance.test_engine_process import Engine
async def main():
    engine = Engine(pathlib.Path({str(tmp_path)!r}))
    await engine.start()
    print(engine.process_id, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(sockets)}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        assert is_alive(engine)
        process.kill()
    deadline = time.monotonic() + 5
    while is_alive(engine):
        assert time.monotonic() < deadline, "the engine outlives its parent"
        time.sleep(0.01)


async def test_an_idle_engine_burns_no_processor(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        engine.ask(1, 2, 3)
        await until(lambda: len(engine.answer) == 3)
        await asyncio.sleep(0.1)
        before, here = _processor_ticks(engine.process_id), time.process_time()
        await asyncio.sleep(1)
        assert _processor_ticks(engine.process_id) - before <= 1
        assert time.process_time() - here < 0.02


def _processor_ticks(process_id: int | None) -> int:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_started_by_hand_it_says_what_to_run() -> None:
    command = [sys.executable, "-m", "appliance.engine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2
    assert "appliance serve" in done.stderr
