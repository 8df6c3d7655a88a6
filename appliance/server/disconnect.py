"""Work for a client only as long as the client is there.

It knows ASGI's `receive` and asyncio; not what the work is. A client that closes its sending half looks to uvicorn
like one that left (its transport closes at end-of-file, and a FIN says no more), so it counts as gone: freeing the
blocks of the many that really left, also of those who wait for an answer that is not streamed, is worth more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def run_while_connected(
    work: Coroutine[Any, Any, Result],
    receive: Receive,
    *,
    idle_s: float | None = None,
    on_idle: Callable[[], Awaitable[float]] | None = None,
) -> Result:
    """Await `work`, cancelled and awaited to its end if the client disconnects or this call is cancelled.

    While the work goes on, `on_idle` is called first after `idle_s` seconds and then after as many as it returned.
    Raises ClientGoneError on a disconnect, else what the work raises.
    """
    worker = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        while True:
            done, _ = await asyncio.wait({worker, leaving}, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
            if worker in done:
                return worker.result()
            if leaving in done:
                raise ClientGoneError
            if on_idle is not None:
                idle_s = await on_idle()
    finally:
        worker.cancel()
        leaving.cancel()
        await asyncio.gather(worker, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
