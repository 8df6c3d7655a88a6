"""What the front process and the engine process say to each other, and the bytes of it (MessagePack).

Knows no socket. Both ends run the same release, so there are no versions: a message that does not decode is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from appliance.client import EngineStats, ModelInfo, Priority
from appliance.engine.request import StepOutput
from appliance.errors import ApplianceError, ContextLengthError
from appliance.sampling_params import SamplingParams


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the class name is the tag."""


class Add(Message, frozen=True):
    """To the engine: queue a request. Answered by Accepted or Refused before its first output."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: Priority
    child_index: int = 0


class Abort(Message, frozen=True):
    """To the engine: forget a request. Not answered; unknown ids are ignored, for the request may just have ended."""

    request_id: str


class Shutdown(Message, frozen=True):
    """To the engine: end now, whatever runs."""


class Progress(Message, frozen=True):
    """From the engine while it loads: what it does and how much of that is done, 0 to 1."""

    stage: str
    fraction: float


class Ready(Message, frozen=True):
    """From the engine, once: the model is loaded."""

    model_info: ModelInfo


class Accepted(Message, frozen=True):
    """From the engine: the request is queued."""

    request_id: str


class Refused(Message, frozen=True):
    """From the engine: the request is not queued, and why."""

    request_id: str
    code: str
    message: str
    param: str | None
    extra: dict[str, int]


class Step(Message, frozen=True):
    """From the engine: all that one step gave, and the gauges after it."""

    outputs: list[StepOutput]
    stats: EngineStats


class Failed(Message, frozen=True):
    """From the engine: the model cannot be loaded. It waits for Shutdown then, so that this is never lost."""

    code: str
    message: str


ToEngine = Add | Abort | Shutdown
FromEngine = Progress | Ready | Accepted | Refused | Step | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine_decoder.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine_decoder.decode(data)


def refusal(request_id: str, error: ApplianceError) -> Refused:
    return Refused(request_id, error.code, error.message, error.param, error.extra())


def to_error(message: Refused | Failed) -> ApplianceError:
    """The error that the engine process met, as an instance of the class whose code it names."""
    error_type = next((kind for kind in _error_types(ApplianceError) if kind.code == message.code), ApplianceError)
    error = error_type.__new__(error_type)  # some classes have constructors that compose the message
    if isinstance(message, Failed):
        ApplianceError.__init__(error, message.message)
        return error
    ApplianceError.__init__(error, message.message, param=message.param)
    if isinstance(error, ContextLengthError):
        error.prompt_tokens = message.extra["n_prompt_tokens"]
        error.max_model_len = message.extra["n_ctx"]
    return error


def _error_types(base: type[ApplianceError]) -> Iterator[type[ApplianceError]]:
    yield base
    for subclass in base.__subclasses__():
        yield from _error_types(subclass)
