"""What a request wishes of the sampler. Standard library only; validated once, at construction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from appliance.errors import InvalidRequestError

MAX_TOKENS_LIMIT = 1 << 20
"""No context served here is longer; a larger max_tokens is a mistake, not a wish."""

MAX_LOGPROBS = 20
"""Likeliest tokens reported a position, as OpenAI has it."""

MAX_BIASES = 1024
MAX_BIAS = 100.0


OutputKind = Literal["delta", "cumulative"]


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise InvalidRequestError(
            f"{name} must be a finite number between {low:g} and {high:g}, found {value!r}", param=name
        )


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer between {low} and {high}, found {value!r}", param=name)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{name} must be a list or a tuple, found {value!r:.200}", param=name)
    return tuple(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling wishes of one request.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. max_tokens None means the rest of the
    context. seed None draws one per request. Stop strings are literals; a single one may be given bare. logit_bias
    holds (token id, bias); a bias is clamped to -100..100, of which -100 bans a token and 100 leaves no other.
    logprobs and prompt_logprobs are the numbers of likeliest tokens to report beside each output token and each
    prompt token; None reports nothing. Only with prompt_logprobs may max_tokens be 0. output_kind is for
    `AsyncLLMEngine` alone: each of its outputs holds what is new, or the whole answer so far.

    Raises InvalidRequestError naming the field, the limit and the value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    """A tuple once constructed, as is the next one."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = "delta"
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_int("top_k", self.top_k, -1, 1 << 31)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, MAX_TOKENS_LIMIT)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}", param="min_tokens"
                )
        if self.seed is not None:
            _check_int("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        # msgspec and callers give lists; tuples make the value hashable.
        object.__setattr__(self, "stop", _as_tuple("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if len(self.stop) > 64 or any(not isinstance(s, str) or not s or len(s) > 1000 for s in self.stop):
            raise InvalidRequestError("stop must be at most 64 strings of 1 to 1000 characters", param="stop")
        if len(self.stop_token_ids) > 256:
            raise InvalidRequestError("stop_token_ids must name at most 256 tokens", param="stop_token_ids")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, (1 << 31) - 1)
        if self.output_kind not in get_args(OutputKind):
            raise InvalidRequestError(
                f"output_kind must be delta or cumulative, found {self.output_kind!r}", param="output_kind"
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequestError(f"logit_bias must name at most {MAX_BIASES} tokens", param="logit_bias")
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, (1 << 31) - 1)
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
                raise InvalidRequestError(f"logit_bias must hold finite numbers, found {bias!r}", param="logit_bias")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if a token that is named here is none of the model's."""
        named = {"stop_token_ids": self.stop_token_ids, "logit_bias": tuple(token for token, _ in self.logit_bias)}
        for name, token_ids in named.items():
            for token in token_ids:
                if token >= vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token id {token}, but the model knows 0 to {vocab_size - 1}", param=name
                    )

    @property
    def is_greedy(self) -> bool:
        """True where every draw would give the most likely token: the temperatures at which softmax has one winner."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p < 1e-5


def params_or_defaults(params: SamplingParams | None, defaults: Mapping[str, float]) -> SamplingParams:
    """None is what a model's makers suggest: `ModelInfo.default_sampling`. Raises InvalidRequestError."""
    if params is None:
        return SamplingParams(**defaults)  # type: ignore[arg-type]  # top_k is checked to be an integer
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params must be a SamplingParams, found {type(params).__name__}", param="sampling_params"
        )
    return params
