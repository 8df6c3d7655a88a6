"""One request inside the engine: its tokens, its KV blocks and how far it has been computed.

Knows no scheduling policy, no text and no torch. The scheduler owns every field that changes; the block manager keeps
the fields it marks as its own.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

from appliance.client import FinishReason, Priority, TokenLogprobs
from appliance.sampling_params import SamplingParams


class RequestStatus(Enum):
    """WAITING holds no blocks, RUNNING may hold some, FINISHED never does."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its answer so far, and the state the scheduler keeps of it. Equal only to itself.

    Positions are half-open: [0, num_computed_tokens) have their KV in the cache, [num_computed_tokens, num_tokens) are
    still to be computed. The newest token of a decoding request is always uncomputed.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    _: KW_ONLY
    priority: Priority = Priority.NORMAL
    seed: int
    """uint64: with the output position and child_index it decides every draw."""
    child_index: int = 0
    """Which of several answers to one prompt."""

    arrival: int = field(default=0, init=False)
    """Counts up over all requests ever added; kept through preemption."""
    max_tokens: int = field(default=0, init=False)
    """params.max_tokens cut to what the context and the KV pool leave; set when the request is added."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens that the first admission found in the prefix cache."""
    num_preemptions: int = field(default=0, init=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    """Of the prompt's tokens from the second on, as far as they are known; kept through preemption."""

    block_tables: list[list[int]] = field(default_factory=list, init=False)
    """One a group of layers: the KV block of each block_size positions. The block manager's, as are the next three."""
    block_digests: list[bytes] = field(default_factory=list, init=False)
    """Chained digest of each full block of tokens, as far as anyone has asked; depends on tokens only."""
    num_registered_blocks: int = field(default=0, init=False)
    """Leading blocks of each table whose digests have been offered to the prefix cache."""
    state_slot: int | None = field(default=None, init=False)
    """Where recurrent layers keep what they remember of the computed tokens; None without such layers or blocks."""

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "a request has at least one prompt token"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Cached tokens have no logits, so whoever wants their log probabilities computes all."""
        return self.params.prompt_logprobs is None

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the lowest runs first and is preempted last."""
        return self.priority, self.arrival

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions [start, stop) of prompt and output, without joining the two."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - split]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave one request. An end-of-sequence or stop token is the last of token_ids."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token: int | None
    """The id of stop_token_ids that ended the answer; None for an end-of-sequence token."""
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of all prompt tokens but the first, in the request's first output, if asked for."""
    error: str = ""
    """With FinishReason.ERROR, the cause in a sentence."""
