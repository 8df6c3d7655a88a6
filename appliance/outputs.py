"""What `LLM` and `AsyncLLMEngine` answer with. `appliance.client.RequestOutput` is another: the increments within."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.client import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer, or what is new of it where the request's `output_kind` is "delta"."""

    index: int
    """Place in `RequestOutput.outputs`."""
    text: str
    token_ids: list[int]
    """Those that `text` was made from, the one that ended the answer included."""
    finish_reason: FinishReason | None = None
    """"stop", "length", "abort" or "error" (the model gave no number that could be sampled); None while it runs."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer; None for the end-of-sequence token."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, if params.logprobs asks for them."""
    error: str = ""
    """With "error", the cause in a sentence."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    """None where token ids were given. A conversation's is what the chat template made of it."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One."""
    finished: bool
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KV was in the prefix cache."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One a prompt token from the second on, if params.prompt_logprobs asks for them."""
