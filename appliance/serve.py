"""`appliance serve`: puts engine, HTTP server and chat page together, and takes them down again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from appliance.errors import ApplianceError, CheckpointError, UsageError
from appliance.local_client import LocalClient
from appliance.model_source import resolve_model
from appliance.server.app import create_app
from appliance.server.http_protocol import OneAtATimeProtocol
from appliance.server.settings import ServerSettings, is_loopback_host
from appliance.settings import Settings
from appliance.startup_display import StartupDisplay, ready_text

_GRACE_S = 2
"""Seconds that running answers get to end by themselves after Ctrl-C."""
_FAREWELL_S = 0.5
"""Seconds for the last words of those that did not; an idle browser tab is cut off after them."""

# Nothing is told to anyone, nothing is fetched while serving.
_ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


def serve(settings: Settings) -> int:
    """Serve until Ctrl-C or SIGTERM and return the exit code.

    Raises UsageError where a setting or the port forbids it, CheckpointError where the model cannot be loaded.
    """
    os.environ.update(_ENVIRONMENT)
    _log_to_stderr(settings.log_level)
    _check_access(settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the event loop takes both signals
    with contextlib.closing(_bind(settings.host, settings.port)) as listener, StartupDisplay() as display:
        folder = resolve_model(settings.model, display.show)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, folder, listener, display))
    return 0


async def _serve(settings: Settings, folder: Path, listener: socket.socket, display: StartupDisplay) -> None:
    client = LocalClient(
        settings.engine_config(folder),
        on_progress=lambda stage, fraction: display.show(f"Starting the engine: {stage}", fraction),
    )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    display.show("Starting the engine", 0.0)
    listener.listen(2048)  # whoever connects from here on is answered, if a little later
    load = asyncio.create_task(client.start())
    try:
        server = _Server(await _http_config(settings, client, folder, listener))
        http = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({load, http, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                _check_loaded(load)
                display.close()
                assert client.model_info is not None, "the client has started without a model"
                print(ready_text(client.model_info, settings, listener.getsockname()[1]), flush=True)
                await asyncio.wait({http, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.should_exit = True
            await asyncio.wait({http}, timeout=_GRACE_S)
            await client.stop()  # ends the answers that still run with an error
            await asyncio.wait({http}, timeout=_FAREWELL_S)
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # one traceback for each that is cut off
            server.force_exit = True
            await http
    finally:
        load.cancel()
        await client.stop()


async def _http_config(
    settings: Settings, client: LocalClient, folder: Path, listener: socket.socket
) -> uvicorn.Config:
    app = create_app(
        client,
        ServerSettings(
            host=settings.host,
            port=listener.getsockname()[1],
            api_keys=tuple(key.get_secret_value() for key in settings.api_key),
            allowed_hosts=settings.allowed_hosts,
            allowed_origins=settings.allowed_origins,
            model_name=settings.engine_config(folder).served_name,
        ),
    )
    if settings.ui:
        # Gradio takes seconds to import; the engine loads meanwhile.
        ui: Any = await asyncio.to_thread(importlib.import_module, "appliance.ui.app")
        app = ui.mount_ui(app, app.state.client)  # the client that counts requests
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=OneAtATimeProtocol,
        ws="none",
        log_config=None,
        access_log=settings.log_level == "debug",
        server_header=False,
    )


def _check_loaded(load: asyncio.Task[None]) -> None:
    """Raise what the load failed with; an engine that died of it is the model's failure too, exit code 3."""
    try:
        load.result()
    except ApplianceError as error:
        if isinstance(error, UsageError | CheckpointError):
            raise
        raise CheckpointError(error.message) from error


class _Server(uvicorn.Server):
    """A server that leaves signals to us: the engine ends after it, and no signal is raised again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _check_access(settings: Settings) -> None:
    if is_loopback_host(settings.host) or settings.api_key:
        return
    if settings.auth:
        raise UsageError(
            f"host {settings.host} lets other machines use this server and there is no API key: set APPLIANCE_API_KEY, "
            "or give --no-auth if that is meant"
        )
    logging.getLogger("appliance").warning(
        "Anyone who reaches %s can use this server: no API key is set.", settings.host
    )


def _bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port, before anything slow begins; it does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise UsageError(f"host {host!r} is no address of this machine: use 127.0.0.1, or 0.0.0.0 for all") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from None
    return listener


def _bind_error(error: OSError, host: str, port: int) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"port {port} of {host} is in use: stop what listens there, or choose another with --port {port + 1}"
        )
    if error.errno == errno.EACCES:
        return UsageError(f"port {port} may not be used by this user: choose one above 1023, e.g. --port 8000")
    return UsageError(f"host {host!r} is no address of this machine: use 127.0.0.1, or 0.0.0.0 for all")


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("appliance").setLevel(level.upper())
    if level == "debug":
        logging.getLogger("uvicorn").setLevel(logging.INFO)
