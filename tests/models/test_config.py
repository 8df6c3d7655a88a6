"""What config.json means to each architecture, and what of it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.models.cache_group import CacheGroup, CacheKind
from appliance.models.config import ModelConfig
from appliance.models.registry import MODELS, REMOTE_CODE, architecture_of, read_model_config
from appliance.models.rope import RotaryTable

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}


def test_unknown_architecture_lists_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel is not served: known are .*LlamaForCausalLM"):
        architecture_of({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnsupportedModelError, match=r"The architecture \[\] is not served"):
        architecture_of({"architectures": [[]]})


@pytest.mark.parametrize("name", REMOTE_CODE)
def test_an_architecture_of_remote_code_is_refused_with_a_successor_that_is_served(name: str) -> None:
    model, successor, architecture = REMOTE_CODE[name]
    with pytest.raises(UnsupportedModelError) as raised:
        architecture_of({"architectures": [name], "auto_map": {"AutoModel": "modeling.Model"}})
    assert f"{name} ({model})" in raised.value.message
    assert f"never run: use {successor}." in raised.value.message
    assert architecture in MODELS
    assert name not in MODELS


def test_code_in_the_folder_is_refused_where_the_architecture_is_unknown_and_ignored_where_it_is_known() -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
    with pytest.raises(UnsupportedModelError, match=r"NewForCausalLM is Python code .*never run: use a model of Llama"):
        architecture_of({"architectures": ["NewForCausalLM"], "auto_map": auto_map})
    assert architecture_of({"architectures": ["LlamaForCausalLM"], "auto_map": auto_map}) == "LlamaForCausalLM"


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
        ("rope_scaling", {"rope_type": "dynamic"}, "'dynamic'"),
        ("rope_scaling", {"rope_type": "linear"}, "no 'rope_scaling.factor'"),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}, "'rope_scaling.factor' is 0"),
        ("rope_scaling", {"type": "yarn", "factor": "4"}, "'rope_scaling.factor' is '4'"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "beta_fast": 0.5}, "'rope_scaling.beta_fast' is 0.5"),
        ("rope_scaling", {"type": "llama3", "low_freq_factor": 4, "high_freq_factor": 1}, "which is 4"),
        ("rope_scaling", 5, "5"),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}, "full_attention"),
        ("partial_rotary_factor", 0.5, "0.5"),
        ("sliding_window", 0, "0"),
        ("sliding_window", 4096.5, "4096.5"),
        ("layer_types", ["full_attention"], "a list of 2"),
        ("layer_types", ["full_attention", "linear_attention"], "'linear_attention'"),
        ("layer_types", "full_attention", "a list of 2"),
        ("layer_types", [["full_attention"], {}], "a list of 2"),
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
        read_model_config(config, "MistralForCausalLM")
    assert found in str(caught.value)
    assert key.split("_")[0] in str(caught.value)


def read(architecture: str, **fields: Any) -> ModelConfig:
    return read_model_config({**SHAPE, **fields}, architecture)


def test_a_mixtral_without_window_or_theta_has_none_and_1e6() -> None:
    assert read("MixtralForCausalLM").windows == (None,) * 4
    assert read("MixtralForCausalLM", sliding_window=8).windows == (8,) * 4
    assert read("MixtralForCausalLM").rope.theta == 1e6
    assert read("MixtralForCausalLM", rope_theta=5e5).rope.theta == 5e5
    assert read("MixtralForCausalLM", rope_parameters={"rope_theta": 5e5}).rope.theta == 5e5


def test_a_mistral_slides_unless_null_says_otherwise() -> None:
    assert read("MistralForCausalLM").windows == (4096,) * 4
    assert read("MistralForCausalLM", sliding_window=None).windows == (None,) * 4
    assert read("LlamaForCausalLM", sliding_window=8).windows == (None,) * 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_qwen_slides_only_on_request_and_from_a_layer_on(architecture: str) -> None:
    window = {"sliding_window": 131072, "max_window_layers": 3}
    assert read(architecture, **window).windows == (None,) * 4
    assert read(architecture, **window, use_sliding_window=False).windows == (None,) * 4
    assert read(architecture, **window, use_sliding_window=True).windows == (None, None, None, 131072)
    assert read(architecture, use_sliding_window=True).windows == (None,) * 4  # max_window_layers 28
    with pytest.raises(CheckpointError, match=r"'layer_types' is .*no window is used"):
        read(architecture, **window, layer_types=["sliding_attention"] * 4)


def test_layers_of_a_window_form_a_group() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = read("MistralForCausalLM", sliding_window=8, layer_types=types)
    assert config.cache_groups == (CacheGroup((0, 3)), CacheGroup((1, 2), 8))
    assert [group.kind for group in config.cache_groups] == [CacheKind.FULL, CacheKind.SLIDING]
    assert config.windows == (None, 8, 8, None)


def test_biases_and_norms_are_the_architectures_own() -> None:
    found = {name: read(name, attention_bias=False) for name in MODELS}
    assert [name for name, config in found.items() if config.qkv_bias] == ["Qwen2ForCausalLM", "Qwen2MoeForCausalLM"]
    assert [name for name, config in found.items() if config.qk_norm] == ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
    assert not any(config.output_bias or config.mlp_bias for config in found.values())
    assert found["Qwen3ForCausalLM"].head_dim == 128
    assert found["Qwen2ForCausalLM"].head_dim == 16


RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("rule", RULES)
def test_old_and_new_spelling_of_the_rotary_scaling_mean_the_same(rule: str) -> None:
    new = read("Qwen2ForCausalLM", rope_parameters={"rope_type": rule, "rope_theta": 5e5, **RULES[rule]}).rope
    assert new.theta == 5e5
    for key in ("type", "rope_type"):
        old = read("Qwen2ForCausalLM", rope_theta=5e5, rope_scaling={key: rule, **RULES[rule]}).rope
        assert old == new


@pytest.mark.parametrize("head_dim", [16, 24, 128])
@pytest.mark.parametrize(
    "rule",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **RULES["llama3"]},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", **RULES["yarn"]},
        {"rope_type": "yarn", **RULES["yarn"], "attention_factor": 0.7},
        {"rope_type": "yarn", **RULES["yarn"], "mscale": 0.707},
        {"rope_type": "yarn", **RULES["yarn"], "mscale": 0.707, "mscale_all_dim": 1.5},
        {"rope_type": "yarn", **RULES["yarn"], "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", **RULES["yarn"], "truncate": False},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256},
    ],
    ids=str,
)
def test_angles_equal_transformers(rule: dict[str, Any], head_dim: int) -> None:
    fields = {**SHAPE, "head_dim": head_dim, "rope_parameters": {"rope_theta": 10000.0, **rule}}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(fields)))
    table = RotaryTable(read("LlamaForCausalLM", **fields).rope, head_dim, 256, torch.float32)
    positions = torch.arange(256)
    cos, sin = theirs(torch.zeros(1), positions.unsqueeze(0))
    torch.testing.assert_close(table.cos, cos[0], atol=1e-5, rtol=0)
    sign = torch.cat([-torch.ones(head_dim // 2), torch.ones(head_dim // 2)])
    torch.testing.assert_close(table.sin * sign, sin[0], atol=1e-5, rtol=0)


def test_yarn_stretches_a_context_left_at_its_original_length() -> None:
    """Qwen 2.5's advice for long texts adds rope_scaling and leaves max_position_embeddings."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read("Qwen2ForCausalLM", rope_scaling=yarn).max_position == 1024
    assert read("Qwen2ForCausalLM", rope_scaling=yarn, max_position_embeddings=1024).max_position == 1024
