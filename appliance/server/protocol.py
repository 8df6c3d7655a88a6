"""The request bodies of the OpenAI protocol, as pydantic types. Unknown keys are ignored, known ones checked strictly.

Facts on names and aliases: OpenAI's API reference, and the dialects of vLLM, llama.cpp, KoboldCpp and LM Studio.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from appliance.client import Priority
from appliance.errors import InvalidRequestError, UnsupportedValueError
from appliance.sampling_params import MAX_LOGPROBS, SamplingParams
from appliance.server.body import quoted

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
)
"""Fields handed to SamplingParams as they are."""

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields for which the model's generation_config.json may speak where the client is silent."""

MAX_N = 16
"""Answers to one prompt."""


def _stop_strings(value: Any) -> tuple[str, ...]:
    """A string, a list of strings, or an empty form of either, which stops nothing."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise InvalidRequestError(f"stop must be a string or a list of strings, found {quoted(value)}.", param="stop")
    return tuple(item for item in strings if item)


def _priority(value: Any) -> Priority:
    names = {priority.name.lower(): priority for priority in Priority}
    if isinstance(value, str) and value in names:
        return names[value]
    if isinstance(value, int) and not isinstance(value, bool) and value in set(Priority):
        return Priority(value)
    raise InvalidRequestError(
        f"priority must be one of {', '.join(names)} or 0 to {len(names) - 1}, found {quoted(value)}.", param="priority"
    )


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """An object of token ids, which JSON writes as strings, to numbers."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias must be an object, found {quoted(value)}.", param="logit_bias")
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 1e9:
            raise InvalidRequestError(
                f"logit_bias must hold numbers between -1e9 and 1e9, found {quoted(bias)}.", param="logit_bias"
            )
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias must have token ids for keys, such as '50256', found {quoted(key)}.", param="logit_bias"
            )
    return tuple((int(key), bias) for key, bias in value.items())


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """The fields that chat and text completion share. Validate it from an object without null fields."""

    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True)

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = 1
    best_of: int | None = None
    priority: Annotated[Priority, BeforeValidator(_priority)] = Priority.NORMAL
    max_completion_tokens: int | None = None
    max_tokens: int | None = Field(
        None, validation_alias=AliasChoices("max_tokens", "max_new_tokens", "n_predict", "max_length")
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "rep_pen", "repeat_penalty")
    )
    seed: int | None = None
    min_tokens: int | None = Field(None, validation_alias=AliasChoices("min_tokens", "min_length"))
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(_stop_strings)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = Field(None, validation_alias=AliasChoices("ignore_eos", "ban_eos_token"))
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, BeforeValidator(_logit_bias)] = None

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if not 1 <= self.n <= MAX_N:
            raise UnsupportedValueError(f"n must be an integer between 1 and {MAX_N}, found {self.n}.", param="n")
        if self.best_of not in (None, self.n):
            raise UnsupportedValueError(
                f"best_of {quoted(self.best_of)} is not supported: answers are not ranked here, leave it out or set it "
                f"to n, which is {self.n}.",
                param="best_of",
            )
        return self

    @abstractmethod
    def reported_logprobs(self) -> dict[str, Any]:
        """The fields of SamplingParams for the log probabilities that are asked for."""

    def sampling_params(self, model_defaults: Mapping[str, float], *, default_max_tokens: int | None) -> SamplingParams:
        """The client's wishes over the model's defaults over ours.

        max_tokens -1 is the rest of the context, as is None. Any integer is a seed: it is taken modulo 2**64.
        Raises InvalidRequestError for a value out of range.
        """
        values: dict[str, Any] = {name: model_defaults[name] for name in _MODEL_DEFAULTS if name in model_defaults}
        if "top_k" in values:
            values["top_k"] = int(values["top_k"])
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                values[name] = tuple(value) if name == "stop_token_ids" else value
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        max_tokens = default_max_tokens if asked is None else None if asked == -1 else asked
        seed = None if self.seed is None else self.seed % (1 << 64)
        return SamplingParams(**values, **self.reported_logprobs(), max_tokens=max_tokens, seed=seed)


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[Any]
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0

    def reported_logprobs(self) -> dict[str, Any]:
        if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be an integer between 0 and {MAX_LOGPROBS}, found {quoted(self.top_logprobs)}.",
                param="top_logprobs",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: set it to true.", param="top_logprobs")
        return {"logprobs": self.top_logprobs if self.logprobs else None}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Any
    """A string, a list of strings, a list of token ids, or a list of lists of token ids."""
    echo: bool = False
    logprobs: int | None = None

    def reported_logprobs(self) -> dict[str, Any]:
        """An echoed prompt has its own where any are asked for; max_tokens 0, legal with echo, wants nothing else."""
        asks_prompt = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        return {"logprobs": self.logprobs, "prompt_logprobs": (self.logprobs or 0) if asks_prompt else None}
