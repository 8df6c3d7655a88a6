"""A response that streams one or more answers as they come, and aborts them when the client leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.client import RequestStream
from appliance.errors import ApplianceError, EngineDeadError
from appliance.server.answers import together
from appliance.server.disconnect import run_while_connected
from appliance.server.logprobs import LogprobsForm
from appliance.server.sse import DONE, ChunkWriter, error_event

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class StreamingAnswer(Response):
    """Sends headers and opening chunks at once, then a chunk per output; see `appliance.server.sse`.

    After `keepalive_s` seconds of silence an empty chunk is sent: clients and proxies give up on silent connections
    (llama-index after 60 s), and comments, the usual means, break parsers.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        writer: ChunkWriter,
        keepalive_s: float,
        logprobs: Sequence[LogprobsForm | None],
    ) -> None:
        """`logprobs`, one a stream, tells log probabilities where they are asked for."""
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._streams = streams
        self._writer = writer
        self._keepalive_s = keepalive_s
        self._logprobs = logprobs
        self._open = list(range(len(streams)))
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write(b"".join(map(self._writer.opening, self._open)))
            ending = await run_while_connected(
                self._answer(), receive, idle_s=self._keepalive_s, on_idle=self._keep_alive
            )
            await send({"type": "http.response.body", "body": ending})
        finally:
            for stream in self._streams:
                await stream.aclose()

    async def _answer(self) -> bytes:
        """Forward every output; returns the last bytes of the response."""
        try:
            await together([self._forward(index, stream) for index, stream in enumerate(self._streams)])
        except ApplianceError as error:
            return error_event(error) + DONE
        return self._writer.ending()

    async def _forward(self, index: int, stream: RequestStream) -> None:
        writer, form = self._writer, self._logprobs[index]
        async for output in stream:
            chunk = writer.text(index, output, None if form is None else await form.content(output))
            if output.finish_reason is not None:
                self._open.remove(index)
                await self._write(chunk + writer.finish(index, output))
                return
            if chunk:
                await self._write(chunk)
        raise EngineDeadError("The engine ended the answer without a reason; send the request again.")

    async def _keep_alive(self) -> float:
        """Send an empty chunk if it is time; returns the seconds until it may be time again."""
        silence = time.monotonic() - self._sent_s
        if silence < self._keepalive_s or not self._open:
            return max(self._keepalive_s - silence, 0.001)
        await self._write(self._writer.idle(self._open[0]))
        return self._keepalive_s

    async def _write(self, body: bytes) -> None:
        self._sent_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
