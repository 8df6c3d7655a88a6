"""The seam between the surfaces (HTTP server, UI) and the engine. Standard library only.

`appliance.server` and `appliance.ui` know an `EngineClient` and nothing behind it; tests hand them a fake one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from appliance.model_details import ModelDetails
from appliance.sampling_params import SamplingParams


class Priority(IntEnum):
    """Lower runs first."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI protocol."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineState(StrEnum):
    """What `/health` says. Only READY answers requests."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. completion_tokens excludes tokens made after a stop string."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was where it stands, in the model's own distribution. Always finite: -9999 is never."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens there, as (token id, logprob), likeliest first; the token itself need not be among them."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One increment of an answer: `text`, `token_ids` and `logprobs` are what is new since the last one.

    finish_reason is set in the last output, and only there. usage is cumulative.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended the answer, None for the end-of-sequence token."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids if params.logprobs asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the first output, if params.prompt_logprobs asks for them: one a prompt token from the second on."""
    error: str = ""
    """With FinishReason.ERROR, the cause in a sentence."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the memory that the model is in: a card's, or the host's."""

    total: int = 0
    others: int = 0
    """Held by everything else (other programs, the driver) when the load began."""
    weights: int = 0
    """Of all packed weights, counted."""
    kv_cache: int = 0
    """Of the whole KV pool; on a CPU a page is taken when it is first written."""
    recurrent_state: int = 0
    """Of the slots of recurrent state, in models that have it."""
    step_predicted: int = 0
    """Temporaries of the largest step, counted from the model's shapes."""
    step_measured: int | None = None
    """The same of such a step that was run to size the KV pool; None on a CPU, whose pool is a share of memory."""
    held: int = 0
    """What the engine process really held once the model was loaded; on a card the KV pool is included."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded, for people and for `/v1/models`."""

    id: str
    created: int
    """Unix seconds of the load."""
    architecture: str
    format: str
    """For people, e.g. "GPTQ 4-bit, group 128, act-order"."""
    bits: int
    kernels: tuple[str, ...]
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    num_contexts: int
    """Requests of max_model_len tokens that the KV pool holds at once."""
    has_chat_template: bool
    memory: MemoryUse = MemoryUse()
    details: ModelDetails | None = None
    warnings: tuple[str, ...] = ()
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k... of the model's generation_config.json."""
    is_text_part: bool = False
    """Of a model that takes images too: they are refused."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of gauges (as of the last step) and monotonic totals since the engine started."""

    requests_running: int = 0
    requests_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """State of the engine and a sentence about it."""

    state: EngineState
    detail: str = ""


class RequestStream(Protocol):
    """The answer to one admitted request: an async iterator of `RequestOutput`.

    Iteration raises EngineDeadError if the engine ends meanwhile. `aclose` (also called by leaving the loop through an
    exception handler) aborts the request if it still runs; it is safe to call twice.
    """

    request_id: str

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...


class EngineClient(Protocol):
    """One running model. All methods are called from one event loop."""

    @property
    def health(self) -> Health: ...

    @property
    def model_info(self) -> ModelInfo | None:
        """None until the model is loaded."""

    @property
    def stats(self) -> EngineStats: ...

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Render the model's chat template over normalised messages (role, content as a string) and tokenize it.

        The generation prompt is added; the template's own special tokens are the only ones (never a second BOS).
        `template_kwargs` may hold `continue_final_message`.

        Raises InvalidRequestError (param "messages") with the template's own text if it refuses, or if the model has no
        chat template; ContextLengthError if the text cannot fit; EngineLoadingError before the model is loaded.
        """

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize raw text as the tokenizer says (BOS by its rule); without `add_special_tokens` the text alone.

        Special tokens written in the text are recognised. Raises ContextLengthError if it cannot fit the context,
        EngineLoadingError.
        """

    async def decode(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        """The text of a whole sequence, special tokens included.

        Raises InvalidRequestError that blames `param` for a token id out of range; EngineLoadingError.
        """

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token stands for inside a text, exactly: half a character's bytes, a leading space."""

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: Priority = Priority.NORMAL,
        request_id: str | None = None,
        param: str = "messages",
        child_index: int = 0,
    ) -> RequestStream:
        """Validate and enqueue a request; everything that can be refused is refused here, before the first byte.

        max_tokens is cut to what the context leaves. `param` names the field to blame in errors. Several answers to one
        prompt are submitted one after the other, each with its `child_index`: with one seed each is another answer.

        Raises InvalidRequestError (empty prompt, token id out of range), ContextLengthError, CapacityError,
        QueueFullError, EngineLoadingError, EngineDeadError.
        """
