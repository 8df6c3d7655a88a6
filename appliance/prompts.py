"""The forms in which a program gives a prompt: a text, token ids, or a dict that holds either."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from appliance.client import ModelInfo
from appliance.errors import ContextLengthError, InvalidRequestError
from appliance.sampling_params import SamplingParams

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

_KEYS = {"prompt", "prompt_token_ids"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, read. At least one of its fields is set; where both are, the text is for people only."""

    text: str | None = None
    token_ids: list[int] | None = None


def read_prompt(value: PromptLike) -> Prompt:
    """Raises InvalidRequestError saying what was found."""
    if isinstance(value, str):
        return Prompt(value)
    if isinstance(value, Mapping):
        return _read_dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return Prompt(None, _read_token_ids(value))
    raise InvalidRequestError(
        "a prompt is a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids', found "
        f"{type(value).__name__}",
        param="prompt",
    )


def read_prompts(value: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """One prompt or a list of them; a list of integers is one. Raises InvalidRequestError saying which one is bad."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        return [read_prompt(value)]
    if value and isinstance(value[0], SupportsIndex):
        return [Prompt(None, _read_token_ids(value))]
    prompts = []
    for index, prompt in enumerate(value):
        try:
            prompts.append(read_prompt(prompt))  # type: ignore[arg-type]  # integers were the case above
        except InvalidRequestError as error:
            blame(error, f"prompts[{index}]")
            raise
    return prompts


def check_prompt(token_ids: Sequence[int], params: SamplingParams, info: ModelInfo, param: str) -> None:
    """Raises InvalidRequestError if there are no tokens or one is unknown, ContextLengthError if there are too many."""
    if not token_ids:
        raise InvalidRequestError("The prompt is empty: at least one token is needed.", param=param)
    if len(token_ids) >= info.max_model_len:  # before millions of them are looked at and sent
        raise ContextLengthError(
            len(token_ids), 1 if params.max_tokens is None else params.max_tokens, info.max_model_len, param=param
        )
    check_token_ids(token_ids, info.vocab_size, param)
    params.check_vocabulary(info.vocab_size)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError if one is not below vocab_size."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"Token id {wrong} is out of range: the model knows 0 to {vocab_size - 1}.", param=param
        )


def blame(error: InvalidRequestError, param: str) -> None:
    """Say which of several prompts an error is about."""
    error.param = param
    error.add_note(f"This is about {param}.")


def _read_dict(value: Mapping[str, Any]) -> Prompt:
    text, token_ids = value.get("prompt"), value.get("prompt_token_ids")
    is_empty = text is None and token_ids is None
    if is_empty or not value.keys() <= _KEYS or not isinstance(text, str | None):
        raise InvalidRequestError(
            f"a prompt's dict holds 'prompt', a string, or 'prompt_token_ids', a list, found {dict(value)!r:.200}",
            param="prompt",
        )
    return Prompt(text, None if token_ids is None else _read_token_ids(token_ids))


def _read_token_ids(value: Sequence[Any]) -> list[int]:
    try:
        return [operator.index(token) for token in value]  # NumPy's integers too
    except TypeError:
        raise InvalidRequestError(f"token ids are a list of integers, found {value!r:.200}", param="prompt") from None
