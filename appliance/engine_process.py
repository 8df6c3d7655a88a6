"""Starts the engine process, keeps it alive, carries messages to and from it.

Knows processes, signals and the socket; not what requests are. Who uses it hears of every message and every death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from appliance.client import EngineState, Health, ModelInfo
from appliance.config import EngineConfig
from appliance.engine.messages import (
    Accepted,
    Failed,
    Progress,
    Ready,
    Refused,
    Shutdown,
    Step,
    ToEngine,
    decode_from_engine,
    encode,
    to_error,
)
from appliance.errors import ApplianceError, EngineDeadError

ENGINE_COMMAND = (sys.executable, "-P", "-m", "appliance.engine")  # -P: never import from the user's working folder
MAX_DEATHS = 8
"""In a row, without the model having been loaded in between; then the engine is given up."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_GRACE_S = 3.0
_STANDARD_ERROR = 2
_LONGEST_FOLDER = 60
"""Characters. A Unix socket's path may have 107."""

log = logging.getLogger(__name__)


class EngineProcess:
    """One engine process, restarted when it dies. Used from one event loop.

    on_message gets what concerns requests, in order; on_death gets the error that every request in flight ends with,
    once per death and once at the end; on_progress gets (stage, fraction from 0 to 1) of each load.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[Accepted | Refused | Step], None],
        on_death: Callable[[ApplianceError], None],
        on_progress: Callable[[str, float], None],
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.health = Health(EngineState.LOADING)
        self.model_info: ModelInfo | None = None
        self.num_restarts = 0
        self._config = config
        self._on_message = on_message
        self._on_death = on_death
        self._on_progress = on_progress
        self._command = command
        self._deaths = 0
        self._is_serving = False
        self._load_error: ApplianceError | None = None
        self._loaded = asyncio.Event()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def process_id(self) -> int | None:
        """Of the engine that runs now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> ModelInfo:
        """Start the engine and wait until the model is loaded.

        A failure of the first load is final, with or without last words: waiting would not mend it.
        Raises the error the engine met, or EngineDeadError.
        """
        assert self._supervisor is None, "an EngineProcess is started once"
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        await self._loaded.wait()
        if self.model_info is None:
            raise self._load_error or EngineDeadError(self.health.detail)
        return self.model_info

    async def stop(self) -> None:
        """End the engine for sure: ask, then SIGTERM, then SIGKILL. Safe to call twice."""
        if self.health.state is not EngineState.FAILED:
            self.health = Health(EngineState.STOPPED, "the engine was stopped")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine; never blocks. Raises EngineDeadError if no loaded engine runs."""
        if self._socket is None or self.health.state is not EngineState.READY:
            raise EngineDeadError(f"the engine does not run: {self.health.detail or self.health.state}")
        if not _send_now(self._socket, message):
            raise EngineDeadError("the engine process has just ended; it is being restarted, send the request again")

    async def _supervise(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="appliance-", dir=_socket_parent()))  # mode 0700
        context = zmq.asyncio.Context(io_threads=1)
        try:
            while True:
                detail = await self._run_once(context, f"ipc://{folder}/{self.num_restarts}")
                self._deaths += 1
                if self.model_info is None or self._deaths >= MAX_DEATHS:
                    self._give_up(detail)
                    return
                delay_s = min(_FIRST_BACKOFF_S * 2 ** (self._deaths - 1), _LONGEST_BACKOFF_S)
                self.health = Health(EngineState.RESTARTING, f"{detail}; it is being restarted")
                log.error("%s; restarting it in %.1f s", detail, delay_s)
                self._on_death(EngineDeadError(f"{detail} while the request was in flight; send it again"))
                await asyncio.sleep(delay_s)
                self.num_restarts += 1
        except Exception as error:  # a fault in here must not leave a healthy face over a dead engine
            log.exception("the engine's supervisor failed")
            self._give_up(f"the engine's supervisor failed ({type(error).__name__}: {error})")
        finally:
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            self._loaded.set()
            self._on_death(EngineDeadError(self.health.detail))

    def _give_up(self, detail: str) -> None:
        if self._load_error is not None:
            detail = self._load_error.message
        self.health = Health(EngineState.FAILED, detail)

    async def _run_once(self, context: zmq.asyncio.Context, address: str) -> str:
        """One life of an engine process; returns how it ended, in words."""
        self._load_error, self._is_serving = None, False
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        arguments = (*self._command, address, self._config.to_json())
        # The engine imports what this process would import, and leaves standard output to it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.PIPE, stdout=_STANDARD_ERROR, env=environment
        )
        self._socket, self._process = socket, process
        receiver = asyncio.create_task(self._receive(socket), name="engine receiver")
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait([receiver, ended], return_when=asyncio.FIRST_COMPLETED)
            if receiver.done():
                receiver.result()
            return _describe_end(await ended)
        finally:
            receiver.cancel()
            try:
                await self._end(process, socket)
            finally:
                self._socket = self._process = None
                socket.close(linger=0)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        """Until the engine's last words: hand on every message."""
        while True:
            message = decode_from_engine(await socket.recv())
            if isinstance(message, Step | Accepted | Refused):
                self._on_message(message)
            elif isinstance(message, Progress):
                if self.health.state is EngineState.LOADING:
                    self.health = Health(EngineState.LOADING, f"{message.stage}, {message.fraction:.0%}")
                self._on_progress(message.stage, message.fraction)
            elif isinstance(message, Ready):
                self.model_info = message.model_info
                self.health = Health(EngineState.READY)
                self._deaths, self._is_serving = 0, True
                self._loaded.set()
            else:
                assert isinstance(message, Failed)
                self._load_error = to_error(message)
                _send_now(socket, Shutdown())
                return

    async def _end(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket) -> None:
        """See that the process has ended: a few seconds for each request to, then SIGKILL."""
        try:
            if self._is_serving and process.returncode is None:
                _send_now(socket, Shutdown())
                await _wait(process)
            if process.returncode is None:
                process.terminate()
                await _wait(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _send_now(socket: zmq.asyncio.Socket, message: ToEngine) -> bool:
    """False if nobody is there to take it."""
    sent = socket.send(encode(message), zmq.NOBLOCK)
    assert isinstance(sent, asyncio.Future), "pyzmq answers sends that may not block at once"
    return sent.exception() is None


async def _wait(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            await process.wait()


def _describe_end(status: int) -> str:
    if status == -signal.SIGKILL:
        return "the engine process was killed (SIGKILL: if nobody did, the system ran out of memory)"
    if status < 0:
        return f"the engine process was ended by {signal.Signals(-status).name}"
    return f"the engine process ended with status {status}"


def _socket_parent() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_FOLDER else "/tmp"
