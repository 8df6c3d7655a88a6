"""The `EngineClient` of a model on this machine: tokenizer here, engine in a process of its own.

Knows requests, from text to tokens and back. The engine alone knows its queue, context and KV pool, so refusals for
those are its own: it accepts or refuses each request before it computes anything of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from appliance.client import EngineState, EngineStats, Health, ModelInfo, Priority
from appliance.config import EngineConfig
from appliance.detokenizer import Detokenizer
from appliance.engine.messages import Abort, Accepted, Add, Refused, Step, to_error
from appliance.engine.request import StepOutput
from appliance.engine_process import ENGINE_COMMAND, EngineProcess
from appliance.errors import (
    ApplianceError,
    ContextLengthError,
    EngineDeadError,
    EngineLoadingError,
    InvalidRequestError,
)
from appliance.model_text import ModelText
from appliance.prompts import check_prompt, check_token_ids
from appliance.request_stream import LocalRequestStream
from appliance.sampling_params import SamplingParams

_TEXT_THREADS = 2

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


class LocalClient:
    """One model, served by an engine process that is restarted when it dies. Used from one event loop.

    on_progress gets (stage, fraction from 0 to 1) while the model is loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[str, float], None] = lambda stage, fraction: None,
        engine_command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._config = config
        self._engine = EngineProcess(
            config,
            on_message=self._on_message,
            on_death=self._on_death,
            on_progress=on_progress,
            command=engine_command,
        )
        self._pool = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")
        self._text: ModelText | None = None
        self._stats = EngineStats()
        self._numbers = itertools.count()
        self._streams: weakref.WeakValueDictionary[str, LocalRequestStream] = weakref.WeakValueDictionary()
        """Streams by the engine's id of the request. Weak, so that a stream that nobody reads is noticed."""
        self._submissions: dict[str, asyncio.Future[None]] = {}

    @property
    def health(self) -> Health:
        return self._engine.health

    @property
    def model_info(self) -> ModelInfo | None:
        info, text = self._engine.model_info, self._text
        if info is None or text is None:
            return None
        return text.describe(info)

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def num_engine_restarts(self) -> int:
        return self._engine.num_restarts

    async def start(self) -> None:
        """Start the engine, load the tokenizer meanwhile, return when requests are answered.

        Raises the error that the model or its tokenizer could not be loaded for; nothing runs any more then.
        """
        try:
            await asyncio.gather(self._engine.start(), self._load_text())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the engine; requests in flight end with EngineDeadError. Safe to call twice."""
        await self._engine.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """See `EngineClient.encode_chat`."""
        text = self._loaded_text()
        prompt = await self._in_pool(lambda: text.render_chat(messages, template_kwargs or {}))
        self._check_length(prompt, "messages")
        return await self._in_pool(lambda: text.tokenizer.encode_rendered(prompt))

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.encode_text`."""
        tokenizer = self._loaded_text().tokenizer
        self._check_length(text, "prompt")
        encode = tokenizer.encode_text if add_special_tokens else tokenizer.encode_rendered
        return await self._in_pool(lambda: encode(text))

    async def decode(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        """See `EngineClient.decode`."""
        tokenizer, info = self._loaded_text().tokenizer, self._engine.model_info
        assert info is not None, "text is read of a model that is loaded"
        check_token_ids(token_ids, info.vocab_size, param)
        return await self._in_pool(lambda: tokenizer.decode(token_ids, skip_special_tokens=False))

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """See `EngineClient.token_bytes`."""
        tokenizer = self._loaded_text().tokenizer
        return await self._in_pool(lambda: [tokenizer.token_bytes(token_id) for token_id in token_ids])

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: Priority = Priority.NORMAL,
        request_id: str | None = None,
        param: str = "messages",
        child_index: int = 0,
    ) -> LocalRequestStream:
        """See `EngineClient.submit`."""
        self._check_ready()
        tokenizer, info = self._loaded_text().tokenizer, self._engine.model_info
        assert info is not None, "an engine that is ready has said what it loaded"
        prompt = list(prompt_token_ids)
        check_prompt(prompt, params, info, param)
        request_id = request_id or uuid.uuid4().hex
        # Two live requests may bear one id: the engine knows them by a number of ours.
        engine_id = f"{request_id}#{next(self._numbers)}"
        stream = LocalRequestStream(request_id, Detokenizer(tokenizer, params), lambda: self._abort(engine_id))
        self._streams[engine_id] = stream
        accepted = self._submissions[engine_id] = asyncio.get_running_loop().create_future()
        try:
            self._engine.send(Add(engine_id, prompt, params, priority, child_index))
            await accepted
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        except ApplianceError as error:
            if isinstance(error, InvalidRequestError):
                error.param = param
            raise
        finally:
            del self._submissions[engine_id]
        return stream

    async def abort(self, request_id: str) -> None:
        """End all live requests of this id; their streams end without a last output. None is fine."""
        for stream in list(self._streams.values()):
            if stream.request_id == request_id:
                await stream.aclose()

    def _check_length(self, text: str, param: str) -> None:
        """Refuse text that cannot fit before it is tokenized: that holds the interpreter's lock, a second for 3 MB."""
        info, tokenizer = self._engine.model_info, self._loaded_text().tokenizer
        if info is not None and (fewest := tokenizer.fewest_tokens(text)) >= info.max_model_len:
            raise ContextLengthError(fewest, 1, info.max_model_len, param=param)

    async def _load_text(self) -> None:
        self._text = await self._in_pool(lambda: ModelText.load(self._config.model))

    async def _in_pool(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _loaded_text(self) -> ModelText:
        if self._engine.health.state is not EngineState.RESTARTING:  # text can be encoded meanwhile
            self._check_ready()
        if self._text is None:
            raise EngineLoadingError("The model's tokenizer is still being loaded: try again in a moment.")
        return self._text

    def _check_ready(self) -> None:
        health = self._engine.health
        if health.state in (EngineState.LOADING, EngineState.RESTARTING):
            detail = f" ({health.detail})" if health.detail else ""
            raise EngineLoadingError(f"The model is still being loaded{detail}: try again in a moment.")
        if health.state is not EngineState.READY:
            raise EngineDeadError(f"The engine does not run: {health.detail}")

    def _abort(self, engine_id: str) -> None:
        with contextlib.suppress(EngineDeadError):  # a dead engine has forgotten the request anyway
            self._engine.send(Abort(engine_id))

    def _on_message(self, message: Accepted | Refused | Step) -> None:
        if isinstance(message, Step):
            self._stats = message.stats
            for output in message.outputs:
                self._deliver(output)
            return
        submission = self._submissions.get(message.request_id)
        if submission is None or submission.done():  # cancelled meanwhile
            return
        if isinstance(message, Refused):
            submission.set_exception(to_error(message))
        else:
            submission.set_result(None)

    def _deliver(self, output: StepOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None or stream.is_closed:
            if output.finish_reason is None:
                self._abort(output.request_id)
            return
        try:
            stream.deliver(output)
        except Exception:  # one request's text must not end the others'
            log.exception("request %s cannot be turned into text", output.request_id)
            self._abort(output.request_id)
            stream.fail(ApplianceError("The answer cannot be turned into text; the log says why."))

    def _on_death(self, error: ApplianceError) -> None:
        for submission in self._submissions.values():
            if not submission.done():
                submission.set_exception(error)
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._stats = EngineStats()
