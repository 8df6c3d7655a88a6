"""A `LocalClient` in a thread of its own, with its own event loop, for callers from any event loop or from none.

Knows threads and loops, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from appliance.config import EngineConfig
from appliance.errors import EngineDeadError
from appliance.local_client import LocalClient

_Result = TypeVar("_Result")


class ClientThread:
    """Starts a client, hands coroutines to its loop, stops it. All methods may be called from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.client = LocalClient(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._has_begun = threading.Event()
        self._loaded: Future[None] = Future()
        self._lock = threading.Lock()
        """Held so that nothing is handed to the loop after it was told to end."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine client", daemon=True)

    def start(self) -> None:
        """Block until the model is loaded. Raises what the load failed with; nothing runs any more then."""
        self._thread.start()
        self._has_begun.wait()
        try:
            self._loaded.result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run a coroutine in the client's loop. Raises EngineDeadError after `close`."""
        with self._lock:
            if self._is_closed:
                coroutine.close()
                raise EngineDeadError("the engine was shut down: make a new one")
            assert self._loop is not None, "a client is used after it was started"
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """`submit`, awaited in the caller's loop. A caller that is cancelled cancels the coroutine."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def close(self) -> None:
        """End the engine, then the thread, and wait for both. Safe to call twice."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first and self._loop is not None and self._main is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the load failed and all has ended
                    self._loop.call_soon_threadsafe(self._main.cancel)
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass  # by close
        except BaseException as error:
            self._loaded.set_exception(error)
        finally:
            self._has_begun.set()

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        self._has_begun.set()
        await self.client.start()
        self._loaded.set_result(None)
        try:
            await asyncio.Event().wait()  # until cancelled
        finally:
            await self.client.stop()
