"""Logits of the Llama declaration equal transformers' on tiny random checkpoints, in float32, from the paged cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.input_batch import InputBatch
from appliance.engine.model_runner import ModelRunner
from appliance.engine.request import Request
from appliance.engine.scheduler import ScheduledRequest
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.models.config import read_model_config
from appliance.models.registry import architecture_of
from appliance.sampling_params import SamplingParams
from tests.models.tiny import save_tiny_llama

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "explicit_head_dim": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def run(runner: ModelRunner, requests: list[Request], lengths: list[int]) -> torch.Tensor:
    """Execute one step of `lengths` tokens each and return the logits of each request's last row."""
    chunks = [
        ScheduledRequest(r, n, is_prefill=n > 1 or r.num_computed_tokens < r.num_prompt_tokens)
        for r, n in zip(requests, lengths, strict=True)
    ]
    batch = InputBatch.build(chunks, runner.plan.layout.block_size)
    batch = replace(batch, logits_rows=torch.tensor(batch.query_start_loc[1:]) - 1)
    logits = runner.execute(batch)
    for request, length in zip(requests, lengths, strict=True):
        request.num_computed_tokens += length
    return logits


def make_request(prompt: list[int], answer: list[int], blocks: list[int]) -> Request:
    request = Request("r", prompt, SamplingParams(), seed=0)
    request.output_token_ids.extend(answer)
    request.block_table.extend(blocks)
    return request


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"maximum relative error {error:.2e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str) -> None:
    """Whole prefill, chunked prefill and decode, two requests in one step, blocks scattered over the pool."""
    reference = save_tiny_llama(tmp_path, **VARIANTS[variant])
    runner = ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=32), lambda stage, done: None)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(131, (n,), generator=generator).tolist() for n in (75, 41)]
    with torch.inference_mode():
        expected = [reference(torch.tensor([t])).logits[0] for t in tokens]

    whole = make_request(tokens[0][:70], tokens[0][70:], [7, 2, 30, 11, 5])
    chunked = make_request(tokens[1][:39], tokens[1][39:], [1, 31, 4])
    logits = run(runner, [whole, chunked], [70, 16])
    assert_close(logits[0], expected[0][69])
    assert_close(logits[1], expected[1][15])
    logits = run(runner, [whole, chunked], [1, 17])  # a decode beside a chunk that attends to an earlier one
    assert_close(logits[0], expected[0][70])
    assert_close(logits[1], expected[1][32])
    logits = run(runner, [whole, chunked], [1, 6])
    assert_close(logits[0], expected[0][71])
    assert_close(logits[1], expected[1][38])
    for step in range(2):  # decodes of different lengths in one batch
        logits = run(runner, [whole, chunked], [1, 1])
        assert_close(logits[0], expected[0][72 + step])
        assert_close(logits[1], expected[1][39 + step])


def test_unknown_architecture_lists_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel is not served: known are .*LlamaForCausalLM"):
        architecture_of({"architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("hidden_size", 1 << 40, "1099511627776"),
        ("num_hidden_layers", 10**9, "1000000000"),
        ("hidden_size", None, "has no 'hidden_size'"),
        ("num_attention_heads", "32", "'32'"),
        ("num_key_value_heads", 3, "multiple"),
        ("head_dim", 7, "even"),
        ("tie_word_embeddings", "yes", "'yes'"),
        ("hidden_act", "gelu", "'gelu'"),
        ("rope_scaling", {"rope_type": "yarn"}, "'yarn'"),
        ("rope_scaling", 5, "5"),
        ("rms_norm_eps", float("nan"), "nan"),
    ],
)
def test_config_contradictions_name_key_and_value(key: str, value: Any, found: str) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 131,
        key: value,
    }
    with pytest.raises(CheckpointError) as caught:
        read_model_config(config, "LlamaForCausalLM")
    assert found in str(caught.value)
    assert key.split("_")[0] in str(caught.value)


def test_shape_against_config_is_refused(tmp_path: Path) -> None:
    """A config that contradicts the tensors is an error that names both."""
    save_tiny_llama(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with pytest.raises(CheckpointError, match=r"gate_proj' has 64 inputs and 96 outputs, config.json says 64 and 128"):
        ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=32), lambda stage, done: None)


def test_untied_without_lm_head_is_refused(tmp_path: Path) -> None:
    """Public bug sglang#2935: tied or not, with lm_head on disk or not."""
    save_tiny_llama(tmp_path, tie_word_embeddings=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(CheckpointError, match="no lm_head"):
        ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=32), lambda stage, done: None)
