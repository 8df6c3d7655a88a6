"""The engine process: `python -m appliance.engine ADDRESS CONFIG`, started by `appliance.engine_process`.

ADDRESS is the ipc:// address of the front process's socket, CONFIG an `EngineConfig` as JSON. Standard input is the
parent's life line: when it closes, this process ends at once. SIGINT is ignored, since a terminal sends it to the whole
group and the parent decides; SIGTERM ends.

Knows the loop around an engine core, and nothing of what happens inside a step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from appliance.client import EngineStats, ModelInfo, Priority
from appliance.config import EngineConfig
from appliance.engine.messages import (
    Abort,
    Accepted,
    Add,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Shutdown,
    Step,
    decode_to_engine,
    encode,
    refusal,
)
from appliance.engine.request import StepOutput
from appliance.errors import ApplianceError
from appliance.sampling_params import SamplingParams

_LINGER_MS = 2000

_ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # a KV pool beside varying activations must not fragment
    "HF_HUB_OFFLINE": "1",  # whatever is to be downloaded has been, by the front process
    "TOKENIZERS_PARALLELISM": "false",
    # How long an OpenMP thread waits awake for the others. With the default, two busy programs beside the engine made a
    # step of 7 ms take 1.5 s on two cores, for it waited for threads that had no core to run on; with this, 17 ms, and
    # 7 ms still on an idle machine.
    "GOMP_SPINCOUNT": "2000",
}
"""Set before torch is imported; what the user has set wins."""

ReportProgress = Callable[[str, float], None]


class Core(Protocol):
    """What the loop needs of `appliance.engine.core.EngineCore`."""

    model_info: ModelInfo

    @property
    def has_work(self) -> bool: ...

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: Priority,
        child_index: int,
    ) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def step(self) -> list[StepOutput]: ...

    def stats(self) -> EngineStats: ...


def run(load: Callable[[EngineConfig, ReportProgress], Core], arguments: Sequence[str]) -> int:
    """Load a core, serve it until told to end, return the exit status.

    `load` gets the configuration and a function to report (stage, fraction) with, to be called in this thread. A test
    passes a light core's.
    """
    if len(arguments) != 2:
        print("The engine is started by `appliance serve`, not by hand: run that.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="life-line", daemon=True).start()
    address, config = arguments
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = _LINGER_MS
    socket.connect(address)
    try:
        return _load_and_serve(load, EngineConfig.from_json(config), socket)
    finally:
        context.destroy()


def _load_and_serve(
    load: Callable[[EngineConfig, ReportProgress], Core], config: EngineConfig, socket: zmq.Socket[bytes]
) -> int:
    try:
        core = load(config, lambda stage, fraction: _send(socket, Progress(stage, fraction)))
    except ApplianceError as error:
        return _fail(socket, Failed(error.code, error.message), error.exit_code)
    except Exception as error:  # whatever broke, the user gets a sentence and the log the rest
        traceback.print_exc()
        text = f"the model could not be loaded ({type(error).__name__}: {error}); the traceback is in the log"
        return _fail(socket, Failed(ApplianceError.code, text), ApplianceError.exit_code)
    _send(socket, Ready(core.model_info))
    _serve(core, socket)
    return 0


def _serve(core: Core, socket: zmq.Socket[bytes]) -> None:
    """Until Shutdown: take what has arrived, step, publish. Blocks on the inbox when there is nothing to compute."""
    while True:
        if not core.has_work:
            socket.poll()
        while socket.poll(0):
            message = decode_to_engine(socket.recv())
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Abort):
                core.abort(message.request_id)
            else:
                _add(core, message, socket)
        outputs = core.step() if core.has_work else []
        _send(socket, Step(outputs, core.stats()))


def _add(core: Core, message: Add, socket: zmq.Socket[bytes]) -> None:
    try:
        core.add(message.request_id, message.prompt_token_ids, message.params, message.priority, message.child_index)
    except ApplianceError as error:
        _send(socket, refusal(message.request_id, error))
    else:
        _send(socket, Accepted(message.request_id))


def _fail(socket: zmq.Socket[bytes], failed: Failed, exit_code: int) -> int:
    _send(socket, failed)
    while not isinstance(decode_to_engine(socket.recv()), Shutdown):
        pass
    return exit_code


def _send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(encode(message))


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _load_engine_core(config: EngineConfig, progress: ReportProgress) -> Core:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from appliance.engine.core import EngineCore

    return EngineCore.load(config, progress)


if __name__ == "__main__":
    sys.exit(run(_load_engine_core, sys.argv[1:]))
