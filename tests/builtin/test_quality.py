"""What bf16 costs on real language: bounded against float32 and against transformers' own bf16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.model_runner import ModelRunner
from appliance.engine.request import Request
from appliance.engine.scheduler import ScheduledRequest
from appliance.sampling_params import SamplingParams
from tests.builtin.reference import load_reference
from tests.prose import PASSAGES

BLOCKS = 10  # of 16 tokens: room for the longest passage


@dataclass(frozen=True)
class Score:
    """Of all predictions: the likeliest token each, and exp of the mean negative log-likelihood."""

    best: Tensor
    perplexity: float


def score(logits: list[Tensor], tokens: list[list[int]]) -> Score:
    losses = [
        F.cross_entropy(x[:-1].float(), torch.tensor(t[1:]), reduction="none")
        for x, t in zip(logits, tokens, strict=True)
    ]
    return Score(torch.cat([x[:-1].argmax(-1) for x in logits]), float(torch.cat(losses).mean().exp()))


def continuations(folder: Path, starts: list[list[int]]) -> list[list[int]]:
    """Text that the model itself finds likely, sampled in float32 from fixed seeds: 6 passages alone are too few
    predictions to tell one percent.
    """
    core = EngineCore.load(EngineConfig(str(folder), dtype="float32", num_kv_blocks=BLOCKS * len(starts)))
    texts = [list(start) for start in starts]
    for i, start in enumerate(starts):
        core.add(str(i), start, SamplingParams(seed=i, max_tokens=BLOCKS * 16 - len(start), ignore_eos=True))
    while core.has_work:
        for output in core.step():
            texts[int(output.request_id)] += output.token_ids
    return texts


def run(runner: ModelRunner, tokens: list[list[int]], as_decode: bool) -> list[Tensor]:
    """Teacher-forced logits of every position: one prefill a passage, or all passages token by token as decodes."""
    requests = []
    for i, ids in enumerate(tokens):
        request = Request(str(i), ids, SamplingParams(), seed=0)
        request.block_tables = [list(range(i * BLOCKS, (i + 1) * BLOCKS))]
        requests.append(request)
    rows: list[list[Tensor]] = [[] for _ in tokens]
    while live := [r for r in requests if r.num_uncomputed_tokens]:
        chunks = [ScheduledRequest(r, 1 if as_decode else r.num_uncomputed_tokens, not as_decode) for r in live]
        [batch] = runner.batches(chunks)
        logits = runner.execute([replace(batch, logits_rows=torch.arange(len(batch.input_ids)))])
        for i, chunk in enumerate(chunks):
            start = batch.query_start_loc[i]
            rows[int(chunk.request.request_id)].append(logits[start : start + chunk.num_tokens].float())
            chunk.request.num_computed_tokens += chunk.num_tokens
    return [torch.cat(r) for r in rows]


def test_bf16_is_bounded(folder: Path) -> None:
    """Top-1 agreement with fp32 at most one point below transformers' own bf16; perplexity within 1 %."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    passages = [tokenizer(passage)["input_ids"] for passage in PASSAGES]
    tokens = passages + continuations(folder, [passage[:12] for passage in passages] * 5)
    assert max(map(len, tokens)) <= BLOCKS * 16

    def theirs(dtype: torch.dtype) -> Score:
        model = load_reference(folder, dtype)
        with torch.inference_mode():
            return score([model(torch.tensor([t])).logits[0] for t in tokens], tokens)

    exact, peer = theirs(torch.float32), theirs(torch.bfloat16)
    settings = EngineConfig(str(folder), num_kv_blocks=BLOCKS * len(tokens))
    runner = ModelRunner(settings, lambda stage, done: None)
    peer_agreement = float((peer.best == exact.best).float().mean())
    for kind, as_decode in (("prefill", False), ("decode", True)):
        ours = score(run(runner, tokens, as_decode), tokens)
        agreement = float((ours.best == exact.best).float().mean())
        print(
            f"{kind}: top-1 {agreement:.4f} (transformers bf16 {peer_agreement:.4f}), perplexity {ours.perplexity:.3f} "
            f"(fp32 {exact.perplexity:.3f}, transformers bf16 {peer.perplexity:.3f})"
        )
        assert agreement >= peer_agreement - 0.01, (
            f"{kind}: top-1 agreement {agreement:.4f} against {peer_agreement:.4f}"
        )
        assert abs(ours.perplexity / exact.perplexity - 1) < 0.01, (
            f"{kind}: {ours.perplexity} against {exact.perplexity}"
        )
