"""The answer to one request, as its client reads it. Knows no engine: whoever feeds it says how to abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from appliance.client import RequestOutput
from appliance.detokenizer import Detokenizer
from appliance.engine.request import StepOutput
from appliance.errors import ApplianceError


class LocalRequestStream:
    """An `appliance.client.RequestStream`. Delivering never blocks: outputs wait in memory, at most one a token."""

    def __init__(self, request_id: str, detokenizer: Detokenizer, abort: Callable[[], None]) -> None:
        """abort is called once, if the answer ends before the engine says so."""
        self.request_id = request_id
        self._detokenizer = detokenizer
        self._abort = abort
        self._queue: asyncio.Queue[RequestOutput | ApplianceError | None] = asyncio.Queue()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is to be delivered."""
        return self._is_closed

    def deliver(self, output: StepOutput) -> None:
        """Take what a step gave. A stop string ends the answer here, ahead of the engine."""
        if self._is_closed:
            return
        increment = self._detokenizer.push(output)
        if increment is not None:
            self._queue.put_nowait(increment)
        if self._detokenizer.is_finished:
            self._close(None, aborts=output.finish_reason is None)

    def fail(self, error: ApplianceError) -> None:
        """End the answer with an error, raised after what has been delivered is read."""
        if not self._is_closed:
            self._close(error, aborts=False)

    async def aclose(self) -> None:
        if not self._is_closed:
            self._close(None, aborts=True)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        item = await self._queue.get()
        if isinstance(item, RequestOutput):
            return item
        self._queue.put_nowait(None)  # whoever asks again gets the end again
        if item is None:
            raise StopAsyncIteration
        raise item

    def _close(self, last: ApplianceError | None, *, aborts: bool) -> None:
        self._is_closed = True
        self._queue.put_nowait(last)
        if aborts:
            self._abort()
