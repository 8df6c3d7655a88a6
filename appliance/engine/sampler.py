"""From logits to token ids.

Order of a row's operations: repetition penalty (prompt and output), frequency and presence penalty (output only), logit
bias, min_tokens mask; then, unless the row is greedy, temperature, top_k, top_p, min_p, one draw.

* top_k keeps exactly k tokens; equal ones rank by lower id, as they do in a greedy row.
* top_p keeps the shortest run of most likely tokens whose share of what top_k left reaches top_p.
* min_p keeps tokens at least min_p times as likely as the likeliest. The filters before it leave that ratio alone, so
  together they keep what each of them would keep. (transformers has the same order; vLLM applies min_p first, so that
  top_p counts its share of what min_p left and may keep fewer.)

The draw inverts the cumulative distribution at one Philox uniform a row: a vocabulary of noise (Gumbel) would cost a
Philox block per token. An unfiltered row accumulates in order of token id and needs no sort; a filtered one accumulates
its few survivors, likeliest first.

A row's result depends on nothing but that row: whatever runs over several rows at once (max, softmax) treats each
row by itself, everything else runs row by row. Knows no request state beyond `SamplingRow`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from appliance.client import TokenLogprobs
from appliance.engine.logprobs import token_logprobs
from appliance.engine.philox import uniforms
from appliance.sampling_params import MAX_BIAS, SamplingParams

NO_TOKEN = -1
"""Stands for the token of a faulty row."""

_MASS_SLACK = 1e-5
"""More than float32 softmax can miss a total of 1 by."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is to be sampled."""

    params: SamplingParams
    seed: int
    """Of the request; taken modulo 2**64."""
    position: int
    """Number of output tokens before this one."""
    prompt_token_ids: Sequence[int]
    """Read only if a repetition penalty is set."""
    output_token_ids: Sequence[int]
    """Read only if a penalty is set."""
    eos_token_ids: tuple[int, ...]
    child_index: int = 0
    """Which of a request's n answers."""

    @property
    def is_plain(self) -> bool:
        """True if the model's logits are taken as they are."""
        params = self.params
        return (
            self.position >= params.min_tokens
            and params.repetition_penalty == 1.0
            and params.frequency_penalty == 0.0
            and params.presence_penalty == 0.0
            and not params.logit_bias
        )


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Outcome of one step."""

    token_ids: list[int]
    """One a row; NO_TOKEN for faulty rows."""
    faulty: list[int]
    """Rows, ascending, that cannot be sampled: their logits hold NaN or +inf, or nothing finite is left of them."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, of the rows that ask for them and are not faulty."""


class Sampler:
    """Samples one token for each row of logits. Ids from vocab_size on (padding of lm_head) are never sampled."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleResult:
        """Sample one token a row from logits [len(rows), >= vocab_size], float32 or bfloat16, which stay unchanged."""
        assert logits.shape[0] == len(rows)
        assert logits.shape[1] >= self._vocab_size
        if not rows:
            return SampleResult([], [])
        logits = logits[:, : self._vocab_size]
        # max propagates NaN, so its values tell faulty rows at no further cost.
        maxima, best = logits.max(dim=-1)
        peaks, token_ids = maxima.tolist(), best.tolist()

        touched = [i for i, row in enumerate(rows) if not (row.params.is_greedy and row.is_plain)]
        scores = logits[touched].float()
        for i, row_scores in zip(touched, scores, strict=True):
            if not rows[i].is_plain:
                _apply_penalties(row_scores, rows[i])
                peak, index = row_scores.max(dim=0)
                peaks[i], token_ids[i] = peak.item(), int(index)

        faulty = [i for i, peak in enumerate(peaks) if not math.isfinite(peak)]
        for i in faulty:
            token_ids[i] = NO_TOKEN
        drawn = [(i, j) for j, i in enumerate(touched) if not rows[i].params.is_greedy and math.isfinite(peaks[i])]
        if drawn:
            # Shifted first, a score cannot overflow however small the temperature. Rows not drawn go along unused.
            scores -= scores.new_tensor([peaks[i] for i in touched]).unsqueeze(1)
            scores /= scores.new_tensor([rows[i].params.temperature for i in touched]).unsqueeze(1)
            probabilities = scores.softmax(dim=-1)
            numbers = uniforms(
                [rows[i].seed for i, _ in drawn],
                [rows[i].position for i, _ in drawn],
                [rows[i].child_index for i, _ in drawn],
            )
            for (i, j), number in zip(drawn, numbers, strict=True):
                token_ids[i] = _draw(probabilities[j], rows[i].params, number)
        logprobs = {}
        for i, row in enumerate(rows):
            if row.params.logprobs is not None and token_ids[i] != NO_TOKEN:
                [logprobs[i]] = token_logprobs(logits[i : i + 1], [token_ids[i]], row.params.logprobs)
        return SampleResult(token_ids, faulty, logprobs)


def _apply_penalties(scores: Tensor, row: SamplingRow) -> None:
    """Apply a row's penalties, biases and its min_tokens mask to its scores [V], float32, in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _indices({*row.prompt_token_ids, *row.output_token_ids}, scores)
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = Counter(row.output_token_ids)
        amounts = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
        scores[_indices(counts, scores)] -= torch.tensor(amounts, device=scores.device)
    if params.logit_bias:
        _apply_biases(scores, params)
    if row.position < params.min_tokens:
        scores[_indices((*row.eos_token_ids, *params.stop_token_ids), scores)] = -math.inf


def _apply_biases(scores: Tensor, params: SamplingParams) -> None:
    """Add a row's biases; the largest leaves no token without it, the smallest none with it, whatever the logits."""
    tokens = _indices((token for token, _ in params.logit_bias), scores)
    biases = torch.tensor([bias for _, bias in params.logit_bias], device=scores.device)
    scores[tokens] += biases.clamp(-MAX_BIAS, MAX_BIAS)
    scores[tokens[biases <= -MAX_BIAS]] = -math.inf
    forced = tokens[biases >= MAX_BIAS]
    if len(forced):
        kept = scores[forced]
        scores.fill_(-math.inf)
        scores[forced] = kept


def _indices(token_ids: Iterable[int], scores: Tensor) -> Tensor:
    """token_ids as an index into scores, without ids that the vocabulary lacks: they cannot be sampled anyway."""
    indices = torch.tensor(list(token_ids), dtype=torch.int64, device=scores.device)
    return indices[indices < len(scores)]


def _draw(probabilities: Tensor, params: SamplingParams, number: float) -> int:
    """The token that number, in [0, 1), falls on in the filtered distribution. probabilities is float32 [V]."""
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p == 0.0:
        return _invert(probabilities.cumsum(0, dtype=torch.float64), number)
    token_ids = _candidates(probabilities, params)
    weights = probabilities[token_ids]
    # Stable over ascending ids: equal tokens rank by lower id. The bits of floats that are not negative sort, as
    # integers, as the floats do, and torch sorts tens of thousands of integers by radix, ten times faster.
    order = weights.view(torch.int32).neg().sort(stable=True).indices
    if params.top_k > 0:
        order = order[: params.top_k]
    ranked = weights[order]
    cumulative = ranked.cumsum(0, dtype=torch.float64)
    kept = len(ranked)
    if params.top_p < 1.0:
        total = cumulative[-1].item() if params.top_k > 0 else 1.0
        kept = min(kept, int(torch.searchsorted(cumulative, params.top_p * total)) + 1)
    if params.min_p > 0.0:
        kept = min(kept, int((ranked >= params.min_p * ranked[0]).sum()))
    return int(token_ids[order[_invert(cumulative[:kept], number)]])


def _candidates(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """Ids, ascending, of all tokens that can survive the filters and of few others, found without sorting.

    They are all tokens from some probability upwards, so filtering them is filtering the vocabulary.
    """
    size = len(probabilities)
    # The maxima of disjoint parts of the vocabulary are cheap to rank, and each is a token's: the k-th has at least k
    # tokens at or above it, and where the first of them add up to top_p, so do the tokens at or above their last.
    parts = size // 64
    wanted = params.top_k if params.top_k > 0 else 256
    maxima = probabilities[: parts * 64].view(64, parts).amax(dim=0).topk(min(wanted, parts)).values
    if params.top_k > 0:
        floor = maxima[-1].item() if wanted <= parts else 0.0
    else:
        floor = params.min_p * probabilities.max().item()
        if params.top_p < 1.0:
            reached = int(torch.searchsorted(maxima.cumsum(0, dtype=torch.float64), params.top_p + _MASS_SLACK))
            # Else: tokens below an even share of the mass that top_p leaves out cannot add up to that mass.
            share = (1.0 - params.top_p - _MASS_SLACK) / size
            floor = max(floor, maxima[reached].item() if reached < len(maxima) else share)
    return (probabilities >= floor).nonzero().squeeze(1)


def _invert(cumulative: Tensor, number: float) -> int:
    """First index whose cumulative weight, float64 and not normalised, exceeds number's share of the total.

    number is at most 1 - 2**-32, so the share stays below the total in float64 and a token of weight 0 is never met.
    """
    return int(torch.searchsorted(cumulative, number * cumulative[-1].item(), right=True))
