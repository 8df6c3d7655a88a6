"""An `EngineClient` around another that records every request in `ServerMetrics`.

`create_app` puts it before the engine and keeps it as `app.state.client`; whoever mounts the user interface hands it
that one, and the interface's requests are counted too.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from appliance.client import (
    EngineClient,
    EngineStats,
    FinishReason,
    Health,
    ModelInfo,
    Priority,
    RequestOutput,
    RequestStream,
)
from appliance.sampling_params import SamplingParams
from appliance.server.metrics import ServerMetrics


class MeasuredStream:
    """A `RequestStream` that notes when its first and its last output came."""

    def __init__(self, stream: RequestStream, metrics: ServerMetrics, submitted_s: float) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._metrics = metrics
        self._submitted_s = submitted_s
        self._first_token_s: float | None = None
        self._tokens = 0
        self._ended = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._stream.__anext__()
        except StopAsyncIteration:
            raise
        except Exception:
            # Whatever ends the stream is counted, then handed on.
            self._end(FinishReason.ERROR)
            raise
        if output.token_ids:
            self._tokens += len(output.token_ids)
            if self._first_token_s is None:
                self._first_token_s = time.monotonic()
        if output.finish_reason is not None:
            self._end(output.finish_reason)
        return output

    async def aclose(self) -> None:
        self._end(FinishReason.ABORT)
        await self._stream.aclose()

    def _end(self, reason: FinishReason) -> None:
        if self._ended:
            return
        self._ended = True
        self._metrics.finish(
            reason,
            submitted_s=self._submitted_s,
            first_token_s=self._first_token_s,
            end_s=time.monotonic(),
            tokens=self._tokens,
        )


class MeasuredClient:
    """See the module's docstring."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics) -> None:
        self._client = client
        self._metrics = metrics

    @property
    def health(self) -> Health:
        return self._client.health

    @property
    def model_info(self) -> ModelInfo | None:
        return self._client.model_info

    @property
    def stats(self) -> EngineStats:
        return self._client.stats

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        return await self._client.encode_chat(messages, template_kwargs=template_kwargs)

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._client.encode_text(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        return await self._client.decode(token_ids, param=param)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return await self._client.token_bytes(token_ids)

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: Priority = Priority.NORMAL,
        request_id: str | None = None,
        param: str = "messages",
        child_index: int = 0,
    ) -> MeasuredStream:
        submitted_s = time.monotonic()
        stream = await self._client.submit(
            prompt_token_ids,
            params,
            priority=priority,
            request_id=request_id,
            param=param,
            child_index=child_index,
        )
        return MeasuredStream(stream, self._metrics, submitted_s)
