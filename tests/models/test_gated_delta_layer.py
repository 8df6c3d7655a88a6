"""A gated delta layer in a model: rows are independent, nothing of a slot's former owner is left, memory is counted."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from appliance.config import EngineConfig
from appliance.engine.model_runner import ModelRunner
from appliance.models.registry import read_model_config
from appliance.quant.checkpoint import open_checkpoint
from tests.models.test_logits import make_request, run
from tests.models.tiny import save_tiny


def test_a_models_logits_are_bit_equal_alone_and_in_a_batch(tmp_path: Path) -> None:
    """In the exact mode, over prefill in chunks and decode, from slots full of NaN."""
    save_tiny(tmp_path, "qwen3_5")
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(131, (n,), generator=generator).tolist() for n in (33, 20, 70, 18)]

    def logits(indices: list[int]) -> list[Tensor]:
        runner = ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=32), lambda stage, done: None)
        assert runner.state is not None
        runner.state.deltas.fill_(torch.nan)
        runner.state.tails.fill_(torch.nan)
        requests = [make_request(tokens[i], [5, 9], list(range(5 * i, 5 * i + 5)), runner) for i in indices]
        steps = [
            run(runner, requests, [13] * len(indices)),
            run(runner, requests, [len(tokens[i]) - 13 for i in indices]),
            *(run(runner, requests, [1] * len(indices)) for _ in range(2)),
        ]
        return [torch.stack([step[n] for step in steps]) for n in range(len(indices))]

    together = logits(list(range(4)))
    for index in range(4):
        assert together[index].isfinite().all()
        assert torch.equal(logits([index])[0], together[index])


def test_memory_counts_every_matrix(tmp_path: Path) -> None:
    """Of a gated delta layer and of gated attention; transformers counts its own."""
    theirs = save_tiny(tmp_path, "qwen3_5")
    config = read_model_config(open_checkpoint(tmp_path).config, "Qwen3_5ForCausalLM")
    layers = [module for name, module in theirs.named_modules() if ".layers." in name]
    matrices = [module.weight.numel() for module in layers if isinstance(module, torch.nn.Linear)]
    assert config.linear_parameters == sum(matrices)
