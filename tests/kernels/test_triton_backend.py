"""Whole models on the Triton kernels, interpreted: what `--device cuda` computes, from embedding to sampled text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.engine.model_runner import ModelRunner
from appliance.sampling_params import SamplingParams
from tests.models.test_logits import make_request, run
from tests.models.tiny import save_tiny

# Steps of (whole, chunked) rows: two prompts at once, a decode beside a later chunk, decodes of different lengths.
STEPS = [[35, 16], [1, 17], [1, 1]]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 20, "tie_word_embeddings": True, "attn_logit_softcapping": 4.0},
    "gemma3": {"sliding_window": 20, "tie_word_embeddings": True, "sliding_window_pattern": 2},
    "glm4": {"num_hidden_layers": 1},
    "granite": {"num_hidden_layers": 1, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "phi3": {"num_hidden_layers": 1, "partial_rotary_factor": 0.5},
    "qwen3": {"head_dim": 24},
    "qwen3_5": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
}
DTYPES = ["float32", "float16"]


def reference_logits(model: PreTrainedModel, tokens: list[int], dtype: torch.dtype) -> tuple[Tensor, float]:
    """transformers' float32 logits [len(tokens), V], and how far ours may be from them.

    float32: sums in another order. float16: twice what rounding to it costs transformers. bfloat16: four times, as the
    interpreter truncates.
    """
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0]
        if dtype == torch.float32:
            return exact, 1e-4 * float(exact.abs().max())
        half = torch.nn.Module.to(copy.deepcopy(model), dtype)
        rounded = half(torch.tensor([tokens])).logits[0].float()
    return exact, (2 if dtype == torch.float16 else 4) * float((rounded - exact).abs().max())


def open_runner(folder: Path, dtype: str) -> ModelRunner:
    config = EngineConfig(str(folder), device="cuda", dtype=dtype, num_kv_blocks=40)
    runner = ModelRunner(config, lambda stage, done: None)
    runner.cache.fill_(torch.nan)  # what a card's fresh memory may hold
    if runner.state is not None:
        runner.state.deltas.fill_(torch.nan)
        runner.state.tails.fill_(torch.nan)
    return runner


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_equal_transformers(tmp_path: Path, name: str, dtype: str) -> None:
    """Dense in float32; in float16, or what a model has instead, every layer 4-bit.

    Prefill, chunked prefill and decode, blocks scattered.
    """
    is_quantized = dtype == "float16"
    theirs = save_tiny(tmp_path, name.partition("-")[0], is_quantized=is_quantized, **MODELS[name])
    runner = open_runner(tmp_path, dtype)
    assert runner.loaded.kernels == (("triton_w4a16", "dense") if is_quantized else ("dense",))
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(131, (n,), generator=generator).tolist() for n in (40, 36)]
    references = [reference_logits(theirs, t, runner.loaded.dtype) for t in tokens]
    requests = [
        make_request(tokens[0][:35], tokens[0][35:], [7, 2, 5], runner),
        make_request(tokens[1][:33], tokens[1][33:], [1, 6, 4], runner),
    ]
    for rows in STEPS:
        logits = run(runner, requests, rows)
        for i, request in enumerate(requests):
            expected, bound = references[i]
            error = float((logits[i].float() - expected[request.num_computed_tokens - 1]).abs().max())
            assert error < bound


@pytest.mark.parametrize("wish", ["auto", "float16"])
def test_a_model_beyond_float16_is_computed_in_bfloat16(tmp_path: Path, wish: str) -> None:
    """Whatever the checkpoint says of itself, and not without a word where float16 was asked for."""
    save_tiny(tmp_path, "gemma2", **MODELS["gemma2"])
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "float16"'))
    loaded = open_runner(tmp_path, wish).loaded
    assert loaded.dtype == torch.bfloat16
    is_told = any("leaves the range of float16" in warning for warning in loaded.warnings)
    assert is_told == (wish == "float16")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_engine_gives_the_references_text(tmp_path: Path, name: str) -> None:
    """4-bit layers in float16, requests of different lengths batched, chunked prefill, a shared prefix, greedy."""
    theirs = save_tiny(tmp_path, name, is_quantized=True, **MODELS[name])
    config = EngineConfig(str(tmp_path), device="cuda", dtype="float16", num_kv_blocks=24, max_num_batched_tokens=24)
    core = EngineCore.load(config)
    assert core.model_info.device == "cuda"
    generator = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, 131, (32,), generator=generator).tolist()
    prompts = [[*prefix, *torch.randint(3, 131, (n,), generator=generator).tolist()] for n in (3, 9, 20)]
    answers: dict[str, list[int]] = {}
    for wave in (prompts[:2], prompts[2:]):
        for i, prompt in enumerate(wave):
            core.add(f"{len(prompt)}-{i}", prompt, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        while core.has_work:
            for output in core.step():
                answers.setdefault(output.request_id.partition("-")[0], []).extend(output.token_ids)
    assert core.stats().prefix_cache_hit_tokens >= 32
    is_clear: list[bool] = []
    for prompt in prompts:
        answer = answers[str(len(prompt))]
        logits, bound = reference_logits(theirs, prompt + answer[:-1], torch.float16)
        logits = logits[len(prompt) - 1 :]
        best = logits.topk(2).values
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        # The best token, or one that rounding to float16 cannot tell from it.
        assert (best[:, 0] - chosen).max() <= 2 * bound
        is_clear += (best[:, 0] - best[:, 1] > 2 * bound).tolist()
    assert sum(is_clear) > len(is_clear) // 2
