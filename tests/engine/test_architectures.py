"""The whole engine on tiny models of other architectures: in the exact mode an answer does not depend on how it was
computed, sliding windows included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from appliance.sampling_params import SamplingParams
from tests.engine.test_core import ask, load
from tests.models.tiny import save_tiny

LENGTHS = (3, 16, 17, 33, 64, 60)
WINDOW = 24
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Case:
    """A model folder, prompts, and transformers' greedy answers to them."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Each token from the whole text anew: no cache that could forget what fell out of a window."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", {"head_dim": 24}),
        ("mistral", {"sliding_window": WINDOW}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("qwen3_5", {}),
        ("qwen3_5_moe", EXPERTS | {"shared_expert_intermediate_size": 96}),
        ("gemma2", {"sliding_window": WINDOW, "tie_word_embeddings": True, "query_pre_attn_scalar": 16}),
        ("glm4", {}),
        ("granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.2}),
        ("smollm3", {"no_rope_layer_interval": 2}),
        ("gemma3", {"sliding_window": WINDOW, "tie_word_embeddings": True, "sliding_window_pattern": 2}),
        ("mixtral", {"num_local_experts": 8, "head_dim": None}),
        ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 96, "mlp_only_layers": [0]}),
        ("ministral", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
    ids=lambda param: param[0],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, settings = request.param
    folder = tmp_path_factory.mktemp(family)
    model = save_tiny(folder, family, **settings)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 131, (n,), generator=generator).tolist() for n in LENGTHS]
    return Case(folder, prompts, [greedy(model, prompt, 24) for prompt in prompts])


def test_alone_and_batched_equal_transformers(case: Case) -> None:
    core = load(case.folder, enable_prefix_caching=False)
    assert [ask(core, [prompt])[0] for prompt in case.prompts] == case.answers
    assert ask(core, case.prompts) == case.answers


def test_chunked_equals_whole(case: Case) -> None:
    assert ask(load(case.folder, max_num_batched_tokens=7, enable_prefix_caching=False), case.prompts) == case.answers


def test_cached_equals_cold(case: Case) -> None:
    """Public bug lmdeploy#3767: a window and the prefix cache together ended the loop; then an ordinary request."""
    core = load(case.folder)
    assert ask(core, case.prompts) == case.answers
    cold = core.stats().prefix_cache_hit_tokens
    assert ask(core, case.prompts) == case.answers
    assert core.stats().prefix_cache_hit_tokens >= cold + 48
    assert len(ask(core, [[5, 6, 7]])[0]) == 24


def test_preempted_equals_undisturbed(case: Case) -> None:
    core = load(case.folder, num_kv_blocks=9 * len(load(case.folder).runner.windows))
    ask(core, [[7, 8]] * 64, SamplingParams(temperature=0.0, max_tokens=1))  # teaches admission to expect short answers
    assert ask(core, case.prompts) == case.answers
    assert core.stats().preemptions > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_answer_within_a_window_outgrows_the_pool(tmp_path: Path, device: str) -> None:
    """Blocks that a window of 24 has left behind serve again: 5 blocks hold 80 tokens, the request has more."""
    model = save_tiny(tmp_path, "mistral", sliding_window=WINDOW)
    prompt, count = list(range(3, 63)), 80 if device == "cpu" else 30
    core = load(tmp_path, device=device, num_kv_blocks=5, max_num_batched_tokens=16)
    assert core.model_info.max_model_len == 256
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    assert ask(core, [prompt], params) == [greedy(model, prompt, count)]


def test_overflow_of_half_precision_is_no_row_of_exclamation_marks(tmp_path: Path) -> None:
    """Public bug vllm#14126: hidden states of Qwen2 beyond 65504 became NaN in float16, and NaN token 0."""
    model = save_tiny(tmp_path, "qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1e5)
    model.save_pretrained(tmp_path)
    prompt = [5, 9, 77, 31]
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-2]
    assert hidden.abs().max() > 65504
    expected = greedy(model, prompt, 1)
    assert ask(load(tmp_path, dtype="half"), [prompt], SamplingParams(temperature=0.0, max_tokens=1)) == [expected]
    answer = ask(load(tmp_path, dtype="half"), [prompt])[0]
    assert len(set(answer)) > 1
    assert 0 not in answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_are_never_sampled(tmp_path: Path, temperature: float) -> None:
    """Public bugs vllm#13175 and mlx-vlm#1917: an embedding padded beyond the tokenizer, whose last rows win."""
    model = save_tiny(tmp_path, "qwen2")
    with torch.no_grad():
        model.lm_head.weight[120:] *= 4
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=1, ignore_eos=True)
    prompts = [[5, 9, 77], [31] * 20]
    assert max(map(max, ask(load(tmp_path), prompts, params))) >= 120

    vocab = {f"t{i}": i for i in range(117)}
    added = [{"id": 117 + i, "content": f"<{i}>", "special": True} for i in range(3)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    core = load(tmp_path)
    assert core.model_info.vocab_size == 120
    assert max(map(max, ask(core, prompts, params))) < 120
