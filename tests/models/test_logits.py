"""Logits of every architecture equal transformers' on tiny random checkpoints, in float32, from the paged cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.model_runner import ModelRunner
from appliance.engine.request import Request
from appliance.engine.scheduler import ScheduledRequest
from appliance.errors import CheckpointError
from appliance.sampling_params import SamplingParams
from tests.models.tiny import save_tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MIXTRAL = {"num_local_experts": 8, "head_dim": None}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 96}


def mixed_experts(module: str) -> int:
    """Routers and experts of every kind: plain, at 4 and at 8 bits, one expert's own modules unlike each other."""
    if ".experts." in module:
        return {"0": 0, "1": 8}.get(module.split(".")[-2], 4) if not module.endswith("7.up_proj") else 8
    return 0 if module.endswith(("lm_head", ".shared_expert_gate")) else 4


MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}
GEMMA = {"tie_word_embeddings": True, "sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": MIXED}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 2.0, 3.5, 6.0],
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-head_dim": {"head_dim": 24},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama-llama3_rope": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 10000.0}},
    "llama-linear_rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    "llama-gptq": {"is_quantized": True},
    "gemma2-tied": GEMMA | {"query_pre_attn_scalar": 9},
    "gemma2-low_caps_gptq": GEMMA
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "is_quantized": True},
    "gemma2-no_caps": GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3-pattern": GEMMA | {"num_hidden_layers": 3, "layer_types": None, "sliding_window_pattern": 3},
    "gemma3-ropes_gptq": GEMMA | {"rope_parameters": LOCAL_AND_GLOBAL, "is_quantized": True},
    "gemma3_that_sees-text_part": GEMMA | {"rope_parameters": LOCAL_AND_GLOBAL, "head_dim": 24},
    "gemma3_that_sees-text_part_gptq": GEMMA | {"is_quantized": True},
    "glm-biases": {},
    "glm-whole_heads_gptq": {"partial_rotary_factor": 1.0, "is_quantized": True},
    "glm4-no_biases": {"attention_bias": False},
    "glm4-biases_gptq": {"is_quantized": True},
    "granite-multipliers": MULTIPLIERS,
    "granite-biases_gptq": MULTIPLIERS | {"attention_bias": True, "mlp_bias": True, "is_quantized": True},
    "granite-defaults": {},
    "mistral-no_window": {"sliding_window": None, "head_dim": 24},
    "mistral-window": {"sliding_window": 24},
    "mistral-window_of_a_block": {"sliding_window": 16},
    "mistral-window_of_one": {"sliding_window": 1},
    "mistral3-text_part": {"sliding_window": None, "head_dim": 24},
    "mistral3-text_part_gptq": {"sliding_window": None, "is_quantized": True},
    "mistral-window_gptq": {"sliding_window": 24, "is_quantized": True},
    "ministral-layer_types": {"sliding_window": 24, "layer_types": MIXED},
    "phi3-window": {"sliding_window": 24},
    "phi3-partial": {"partial_rotary_factor": 0.75},
    "phi3-partial_gptq": {"partial_rotary_factor": 0.5, "is_quantized": True},
    "phi3-longrope": {
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 32,
    },
    "phi3-longrope_short": {
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 128,
        "max_model_len": 128,
    },
    "qwen2-unused_window": {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 0},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen2-yarn": {"rope_parameters": YARN | {"rope_theta": 1000000.0}},
    "qwen2-tied_gptq": {"tie_word_embeddings": True, "is_quantized": True},
    "qwen3-head_dim": {"head_dim": 24},
    "qwen3-window": {"use_sliding_window": True, "sliding_window": 17, "layer_types": MIXED},
    "qwen3-yarn": {"rope_parameters": YARN | {"attention_factor": 0.8}},
    "qwen3-gptq": {"head_dim": 24, "is_quantized": True},
    "qwen3_5": {},
    "qwen3_5-full_first": {"layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 8},
    "qwen3_5-all_turned": {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}, "linear_conv_kernel_dim": 2},
    "qwen3_5-biases_tied": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3_5-gptq": {"is_quantized": True},
    "qwen3_5_that_sees-gptq": {"is_quantized": True},
    "qwen3_5_moe": SHARED,
    "qwen3_5_moe-stacked": SHARED | {"is_stacked": True},
    "qwen3_5_moe_that_sees-gptq": SHARED | {"is_quantized": True},
    "smollm3-interval": {"no_rope_layer_interval": 2},
    "smollm3-listed_gptq": {"no_rope_layers": [0, 1, 1], "is_quantized": True, "tie_word_embeddings": True},
    "smollm3-window": {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 24},
    "mixtral": MIXTRAL,
    "mixtral-stacked": MIXTRAL | {"is_stacked": True},
    "mixtral-window": MIXTRAL | {"sliding_window": 24},
    "mixtral-gptq": MIXTRAL | {"is_quantized": True},
    "qwen2_moe": SHARED,
    "qwen2_moe-normalized": SHARED | {"norm_topk_prob": True, "qkv_bias": False},
    "qwen2_moe-stacked_and_dense": SHARED | {"is_stacked": True, "mlp_only_layers": [0]},
    "qwen2_moe-window": SHARED | {"use_sliding_window": True, "sliding_window": 24},
    "qwen2_moe-gptq": SHARED | {"is_quantized": True},
    "qwen2_moe-gptq_mixed": SHARED | {"is_quantized": True, "bits_of": mixed_experts},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "qwen3_moe-stacked": EXPERTS | {"is_stacked": True},
    "qwen3_moe-dense_layer": EXPERTS | {"decoder_sparse_step": 2},
    "qwen3_moe-named_dense_layer": EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_moe-all_experts": EXPERTS | {"num_experts_per_tok": 8},
    "qwen3_moe-window": EXPERTS | {"use_sliding_window": True, "sliding_window": 24},
    "qwen3_moe-gptq": EXPERTS | {"norm_topk_prob": True, "is_quantized": True},
    "qwen3_moe-gptq_mixed": EXPERTS | {"is_quantized": True, "bits_of": mixed_experts},
}


def run(runner: ModelRunner, requests: list[Request], lengths: list[int]) -> torch.Tensor:
    """Execute one step of `lengths` tokens each and return the logits of each request's last row."""
    chunks = [
        ScheduledRequest(r, n, is_prefill=n > 1 or r.num_computed_tokens < r.num_prompt_tokens)
        for r, n in zip(requests, lengths, strict=True)
    ]
    batches = [replace(b, logits_rows=torch.tensor(b.query_start_loc[1:]) - 1) for b in runner.batches(chunks)]
    logits = runner.execute(batches)
    for request, length in zip(requests, lengths, strict=True):
        request.num_computed_tokens += length
    return logits


def make_request(prompt: list[int], answer: list[int], blocks: list[int], runner: ModelRunner) -> Request:
    """A request whose first group has `blocks`, each later one others; its state is in the slot of the first block."""
    request = Request("r", prompt, SamplingParams(), seed=0)
    request.output_token_ids.extend(answer)
    request.block_tables = [[32 * group + block for block in blocks] for group in range(len(runner.windows))]
    request.state_slot = blocks[0] if runner.state is not None else None
    return request


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"maximum relative error {error:.2e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str) -> None:
    """Whole prefill, chunked prefill and decode, two requests in one step, blocks scattered over the pool."""
    settings = dict(VARIANTS[variant])
    context = settings.pop("max_model_len", None)
    reference = save_tiny(tmp_path, variant.partition("-")[0], **settings)
    engine = EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=96, max_model_len=context)
    runner = ModelRunner(engine, lambda stage, done: None)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(131, (n,), generator=generator).tolist() for n in (75, 41)]
    with torch.inference_mode():
        expected = [reference(torch.tensor([t])).logits[0] for t in tokens]

    whole = make_request(tokens[0][:70], tokens[0][70:], [7, 2, 30, 11, 5], runner)
    chunked = make_request(tokens[1][:39], tokens[1][39:], [1, 31, 4], runner)
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


BFLOAT16 = [
    "llama-gptq",
    "glm4-biases_gptq",
    "granite-biases_gptq",
    "qwen3-gptq",
    "qwen3_5-gptq",
    "phi3-partial_gptq",
    "gemma2-low_caps_gptq",
    "gemma3-ropes_gptq",
]


@pytest.mark.parametrize("variant", BFLOAT16)
def test_bfloat16_is_as_close_as_transformers(tmp_path: Path, variant: str) -> None:
    """4-bit layers through the CPU's own kernels, prefill and decode: twice what rounding to it costs transformers."""
    reference = save_tiny(tmp_path, variant.partition("-")[0], **VARIANTS[variant])
    runner = ModelRunner(EngineConfig(str(tmp_path), dtype="bfloat16", num_kv_blocks=64), lambda stage, done: None)
    tokens = torch.randint(131, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    request = make_request(tokens[:36], tokens[36:], [3, 0, 7], runner)
    logits = torch.cat([run(runner, [request], [n]) for n in (36, 1, 1, 1, 1)]).float()
    with torch.inference_mode():
        exact = reference(torch.tensor([tokens])).logits[0, 35:]
        rounded = torch.nn.Module.to(reference, torch.bfloat16)(torch.tensor([tokens])).logits[0, 35:].float()
    assert (logits - exact).square().mean() < 4 * (rounded - exact).square().mean()


def test_shape_against_config_is_refused(tmp_path: Path) -> None:
    """A config that contradicts the tensors is an error that names both."""
    save_tiny(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with pytest.raises(CheckpointError, match=r"gate_proj' has 64 inputs and 96 outputs, config.json says 64 and 128"):
        ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=32), lambda stage, done: None)


def test_untied_without_lm_head_is_refused(tmp_path: Path) -> None:
    """Public bug sglang#2935: tied or not, with lm_head on disk or not."""
    save_tiny(tmp_path, tie_word_embeddings=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(CheckpointError, match="no lm_head"):
        ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=32), lambda stage, done: None)
