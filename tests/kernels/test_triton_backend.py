"""A whole model whose attention runs through the Triton kernels, interpreted, equals the one on the CPU's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine import model_runner
from appliance.kernels.triton_attention import TritonAttention
from tests.models.test_logits import assert_close, make_request, run
from tests.models.tiny import save_tiny_llama

# Steps of (whole, chunked) rows: two prompts at once, a decode beside a later chunk, decodes of different lengths.
STEPS = [[35, 16], [1, 17], [1, 1]]


def test_llama_on_triton_attention_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = save_tiny_llama(tmp_path)
    monkeypatch.setattr(model_runner, "CpuAttention", TritonAttention)
    runner = model_runner.ModelRunner(
        EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=8), lambda stage, done: None
    )
    runner.cache.fill_(torch.nan)  # what a card's fresh memory may hold
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(131, (n,), generator=generator).tolist() for n in (40, 36)]
    with torch.inference_mode():
        expected = [theirs(torch.tensor([t])).logits[0] for t in tokens]
    requests = [
        make_request(tokens[0][:35], tokens[0][35:], [7, 2, 5]),
        make_request(tokens[1][:33], tokens[1][33:], [1, 6, 4]),
    ]
    for rows in STEPS:
        logits = run(runner, requests, rows)
        for i, request in enumerate(requests):
            assert_close(logits[i], expected[i][request.num_computed_tokens - 1])
