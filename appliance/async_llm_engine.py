"""`AsyncLLMEngine`: a model in a process of its own, for programs whose requests come and go.

Knows how requests of the caller's event loop, whichever that is, meet a client that lives in another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

from appliance import client as seam
from appliance.client import FinishReason, ModelInfo, TokenLogprobs
from appliance.client_thread import ClientThread
from appliance.engine_arguments import engine_config, log_warnings
from appliance.errors import ApplianceError
from appliance.outputs import CompletionOutput, RequestOutput
from appliance.prompts import PromptLike, read_prompt
from appliance.request_stream import LocalRequestStream
from appliance.sampling_params import SamplingParams, params_or_defaults

_Item = seam.RequestOutput | ApplianceError | None
"""What a request's queue holds: increments, then an error or None for the end."""


class AsyncLLMEngine:
    """A loaded model. Used from any event loop: several at once, or one after another.

    The engine process ends with `shutdown`, when the object is collected, or with the interpreter.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_model_len: int | None = None,
        dtype: str = "auto",
        enable_prefix_caching: bool = True,
        **settings: Any,
    ) -> None:
        """Start an engine and load a model, as `LLM` does. Blocks until it is loaded; needs no event loop."""
        settings |= {"max_model_len": max_model_len, "dtype": dtype, "enable_prefix_caching": enable_prefix_caching}
        self._thread = ClientThread(engine_config(model, settings))
        self._thread.start()
        self._close = weakref.finalize(self, self._thread.close)
        log_warnings(self.model_info)

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any] | None = None, **keywords: Any) -> AsyncLLMEngine:
        """The same from a dict, from keywords, or from both; keywords win."""
        return cls(**{**(engine_args or {}), **keywords})

    @property
    def model_info(self) -> ModelInfo:
        """What is loaded, and in `warnings` what is done otherwise than asked."""
        info = self._thread.client.model_info
        assert info is not None, "an engine has loaded its model before anyone sees it"
        return info

    async def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt as it comes. With output_kind "delta" the outputs' texts joined are the answer.

        sampling_params None is the sampling the model's makers suggest, with an answer of up to the rest of the
        context. request_id None makes one; two live requests may have the same. Leaving the loop, or closing this
        generator, aborts the request. The last output, and only that, is `finished`.

        Raises InvalidRequestError, ContextLengthError or CapacityError at the first step of the iteration if the prompt
        cannot be answered, EngineLoadingError while the engine is restarted, EngineDeadError if it ends.
        """
        client, question = self._thread.client, read_prompt(prompt)
        params = params_or_defaults(sampling_params, self.model_info.default_sampling)
        token_ids = question.token_ids
        if token_ids is None:
            assert question.text is not None, "a prompt has text or token ids"
            token_ids = await self._thread.call(client.encode_text(question.text))
        submission = client.submit(token_ids, params, request_id=request_id, param="prompt")
        stream = await self._thread.call(submission)
        answer = _Answer(stream.request_id, question.text, token_ids, params.output_kind == "cumulative")
        loop, items = asyncio.get_running_loop(), asyncio.Queue[_Item]()
        pump = self._thread.submit(_pump(stream, lambda item: loop.call_soon_threadsafe(items.put_nowait, item)))
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, ApplianceError):
                    raise item
                yield answer.output(item)
            if not answer.is_finished:
                yield answer.aborted()
        finally:
            pump.cancel()

    async def abort(self, request_id: str) -> None:
        """End the live requests of this id, if there are any; their last output has the finish_reason "abort"."""
        await self._thread.call(self._thread.client.abort(request_id))

    def shutdown(self) -> None:
        """End the engine process and wait until it has ended; requests in flight raise EngineDeadError."""
        self._close()


class _Answer:
    """Makes a request's increments into its outputs."""

    def __init__(self, request_id: str, prompt: str | None, token_ids: list[int], is_cumulative: bool) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = token_ids
        self._is_cumulative = is_cumulative
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: tuple[TokenLogprobs, ...] = ()
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._num_cached_tokens = 0
        self.is_finished = False

    def output(self, increment: seam.RequestOutput) -> RequestOutput:
        self._num_cached_tokens = increment.usage.cached_tokens
        self._prompt_logprobs += increment.prompt_logprobs
        answer = CompletionOutput(
            0,
            increment.text,
            list(increment.token_ids),
            increment.finish_reason,
            increment.stop_reason,
            increment.logprobs,
            increment.error,
        )
        return self._output(answer)

    def aborted(self) -> RequestOutput:
        return self._output(CompletionOutput(0, "", [], FinishReason.ABORT))

    def _output(self, new: CompletionOutput) -> RequestOutput:
        if self._is_cumulative:
            self._text += new.text
            self._token_ids = self._token_ids + new.token_ids
            self._logprobs += new.logprobs
            new = replace(new, text=self._text, token_ids=self._token_ids, logprobs=self._logprobs)
        self.is_finished = new.finish_reason is not None
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[new],
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )


async def _pump(stream: LocalRequestStream, deliver: Callable[[_Item], object]) -> None:
    """Hand a stream's outputs to another event loop; one call an output, where asking for each would be two."""
    last: ApplianceError | None = None
    with contextlib.suppress(RuntimeError):  # of deliver, when that loop is closed: nobody waits there any more
        try:
            async for increment in stream:
                deliver(increment)
        except ApplianceError as error:
            last = error
        finally:
            await stream.aclose()
            deliver(last)
