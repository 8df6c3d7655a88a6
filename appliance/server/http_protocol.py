"""HTTP/1.1 as uvicorn speaks it, less pipelining.

uvicorn stops reading a connection once a second request has arrived behind the one it answers, so it no longer sees
that the client has left, and the answer runs to its end for nobody. No client in use pipelines; one that does gets the
first answer and a closed connection, after which it must repeat the rest anyway (RFC 9112, 9.3.2).
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class OneAtATimeProtocol(HttpToolsProtocol):
    """A connection on which a request that comes before the answer to the last one is dropped."""

    _drops_input = False

    def data_received(self, data: bytes) -> None:
        if not self._drops_input:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        answered = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            self.pipeline.clear()
            self.cycle = answered
            answered.keep_alive = False
            self._drops_input = True
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if not self._drops_input:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._drops_input:
            super().on_message_complete()
