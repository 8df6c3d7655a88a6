"""Every error a user can meet: one tree, each with a stable code and an HTTP status.

    ApplianceError
    |- UsageError                 the command line or a setting is wrong
    |- CheckpointError            the model on disk cannot be served
    |  |- UnsupportedModelError       known to exist, not served here
    |  |- SelfTestError               its weights, or every kernel for them, failed the test at load
    |- QuantizationError          a model could not be quantised, or the result is wrong
    |- InvalidRequestError        400, the request itself is wrong
    |  |- ContextLengthError          prompt longer than the context
    |  |- CapacityError               prompt can never fit the KV pool
    |- ModelNotFoundError         404
    |- QueueFullError             429
    |- EngineLoadingError         503
    |- EngineDeadError            500

A message is a sentence that says what was found, what is allowed and what to do. Standard library only.
"""

from __future__ import annotations

import re
from typing import ClassVar

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ApplianceError(Exception):
    """Base of all errors that are shown to a user."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, param: str | None = None) -> None:
        # Names out of files may hold what a terminal would obey.
        message = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], message)
        super().__init__(message)
        self.message = message
        self.param = param

    def extra(self) -> dict[str, int]:
        """Further fields of the JSON error object."""
        return {}


class UsageError(ApplianceError):
    """A flag, a setting or the machine does not allow what was asked for."""

    code = "usage"
    exit_code = 2


class CheckpointError(ApplianceError):
    """The model's files are missing, corrupt or contradict each other."""

    code = "bad_checkpoint"
    exit_code = 3


class UnsupportedModelError(CheckpointError):
    """The model is of a format or an architecture that is not served."""

    code = "unsupported_model"


class SelfTestError(CheckpointError):
    """Weights that cannot be right, or that no kernel computes rightly with."""

    code = "self_test_failed"


class QuantizationError(ApplianceError):
    """A model could not be quantised, or what was written is not what it was made of."""

    code = "quantization_failed"
    exit_code = 4


class InvalidRequestError(ApplianceError):
    """A field of the request is missing, ill-typed or out of range."""

    code = "invalid_value"
    status = 400
    type = "invalid_request_error"


class UnsupportedValueError(InvalidRequestError):
    """The request asks for something that this server does not do."""

    code = "unsupported_value"


class ContextLengthError(InvalidRequestError):
    """The prompt is longer than the context."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, max_model_len: int, *, param: str = "messages") -> None:
        # One text for every client's matcher (LiteLLM, LangChain, Claude Code, Roo).
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} for the completion). "
            f"prompt is too long: {prompt_tokens} tokens > {max_model_len} maximum. [context_length_exceeded]",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len

    def extra(self) -> dict[str, int]:
        return {"n_prompt_tokens": self.prompt_tokens, "n_ctx": self.max_model_len}


class CapacityError(InvalidRequestError):
    """The prompt needs more KV blocks than the whole pool has."""

    code = "kv_capacity_exceeded"


class ModelNotFoundError(ApplianceError):
    """The request names a model that is not loaded."""

    code = "model_not_found"
    status = 404
    type = "invalid_request_error"


class QueueFullError(ApplianceError):
    """Too many requests wait already."""

    code = "queue_full"
    status = 429
    type = "rate_limit_error"


class EngineLoadingError(ApplianceError):
    """The model is still being loaded."""

    code = "model_loading"
    status = 503
    type = "service_unavailable"


class EngineDeadError(ApplianceError):
    """The engine process ended while the request was in flight."""

    code = "engine_dead"
    status = 500
