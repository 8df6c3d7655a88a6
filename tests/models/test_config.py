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
from appliance.models.mixture_config import MixtureConfig
from appliance.models.registry import MODELS, REMOTE_CODE, architecture_of, read_model_config
from appliance.models.rope import RotaryTable, inverse_frequencies
from appliance.models.rope_config import LinearScaling, RopeConfig

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
    with pytest.raises(
        UnsupportedModelError, match=r"NewForCausalLM is Python code .*never run: use a model of .*LlamaF"
    ):
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
        ("rope_scaling", {"rope_type": "ntk"}, "'ntk'"),
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


def test_a_text_part_has_its_architectures_defaults_and_no_others_layers() -> None:
    architecture = "Mistral3ForConditionalGeneration"
    config = read_model_config({"text_config": {**SHAPE, "model_type": "mistral"}}, architecture)
    assert (config.head_dim, config.rope.theta, config.windows) == (128, 1e9, (None,) * 4)
    assert config.is_text_part
    assert not read("MistralForCausalLM").is_text_part
    with pytest.raises(UnsupportedModelError, match=r"'text_config.model_type' is 'ministral3'.*'mistral'"):
        read_model_config({"text_config": {**SHAPE, "model_type": "ministral3"}}, architecture)
    with pytest.raises(CheckpointError, match="no 'text_config'"):
        read_model_config(SHAPE, architecture)


def test_a_gemma_3_has_its_makers_defaults() -> None:
    """The 27B's text_config names little more than sizes; its window and ropes alternate as the family's do."""
    text = {"num_hidden_layers": 12, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = read_model_config({"text_config": text}, "Gemma3ForConditionalGeneration")
    assert config.windows == ((1024,) * 5 + (None,)) * 2
    assert config.ropes == ((RopeConfig(1e4),) * 5 + (RopeConfig(1e6, LinearScaling(8.0)),)) * 2
    assert (config.head_dim, config.vocab_size, config.max_position) == (256, 262208, 131072)
    assert config.attention_scale == 1 / 16
    assert config.attention_soft_cap is config.logits_soft_cap is None


def test_old_and_new_spelling_of_two_rotary_embeddings_mean_the_same() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = read("Gemma3ForCausalLM", rope_theta=2e6, rope_local_base_freq=5e3, rope_scaling=linear)
    both = {"full_attention": {"rope_theta": 2e6, **linear}, "sliding_attention": {"rope_theta": 5e3}}
    assert read("Gemma3ForCausalLM", rope_parameters=both) == old


def test_a_gemma_2_caps_unless_null_says_otherwise() -> None:
    config = read("Gemma2ForCausalLM", hidden_act="gelu_pytorch_tanh")
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert read("Gemma2ForCausalLM", final_logit_softcapping=None).logits_soft_cap is None
    with pytest.raises(UnsupportedModelError, match="'hidden_activation' is 'relu': this architecture uses 'gelu_py"):
        read("Gemma2ForCausalLM", hidden_activation="relu")


def test_a_gemma_that_sees_what_comes_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'use_bidirectional_attention' is True"):
        read("Gemma3ForCausalLM", use_bidirectional_attention=True)


def test_every_fourth_layer_of_a_smollm_3_is_not_turned_unless_listed() -> None:
    rope = RopeConfig(2e6)
    assert read("SmolLM3ForCausalLM").ropes == (rope, rope, rope, None)
    assert read("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0, 1]).ropes == (None, rope, rope, None)
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    assert read("SmolLM3ForCausalLM", **windowed).windows == (None, None, None, 8)
    assert read("SmolLM3ForCausalLM", sliding_window=8).windows == (None,) * 4
    for listed in ([1, 1, 1], [1, 1, 1, 2], "1111"):
        with pytest.raises(CheckpointError, match=r"'no_rope_layers' is .*at least 4, each of them 0 or 1"):
            read("SmolLM3ForCausalLM", no_rope_layers=listed)


@pytest.mark.parametrize(
    ("architecture", "heads", "intermediate_size", "vocab_size", "theta", "qkv_bias"),
    [
        ("LlamaForCausalLM", (7168, 56, 8), 20480, 64000, 5e6, False),  # Yi 34B
        ("LlamaForCausalLM", (4096, 32, 8), 14336, 128256, 5e5, False),  # DeepSeek R1 Distill Llama 8B
        ("Qwen2ForCausalLM", (5120, 40, 8), 27648, 152064, 1e6, True),  # DeepSeek R1 Distill Qwen 32B
    ],
)
def test_yi_and_the_r1_distills_are_llamas_and_qwens(
    architecture: str,
    heads: tuple[int, int, int],
    intermediate_size: int,
    vocab_size: int,
    theta: float,
    qkv_bias: bool,
) -> None:
    """By the architecture that their files name, with nothing that it does not read."""
    hidden_size, num_heads, num_kv_heads = heads
    fields = {
        "architectures": [architecture],
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 60,
        "vocab_size": vocab_size,
        "rope_theta": theta,
        "sliding_window": 131072,
        "use_sliding_window": False,
    }
    config = read_model_config(fields, architecture_of(fields))
    assert (config.head_dim, config.qkv_bias, config.rope) == (128, qkv_bias, RopeConfig(theta))
    assert config.windows == (None,) * 60
    assert not config.tie_word_embeddings


def test_layers_of_a_window_form_a_group() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = read("MistralForCausalLM", sliding_window=8, layer_types=types)
    assert config.cache_groups == (CacheGroup((0, 3)), CacheGroup((1, 2), 8))
    assert [group.kind for group in config.cache_groups] == [CacheKind.FULL, CacheKind.SLIDING]
    assert config.windows == (None, 8, 8, None)


def test_biases_and_norms_are_the_architectures_own() -> None:
    found = {name: read(name, attention_bias=False) for name in MODELS if name.endswith("CausalLM")}
    assert [name for name, config in found.items() if config.qkv_bias] == ["Qwen2ForCausalLM", "Qwen2MoeForCausalLM"]
    assert read("GlmForCausalLM").qkv_bias
    assert read("Glm4ForCausalLM").qkv_bias
    assert [name for name, config in found.items() if config.qk_norm] == [
        "Gemma3ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    ]
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
        {"rope_type": "dynamic", "factor": 4.0},
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


FULL_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_the_served_context_chooses_the_factors_of_a_long_rope(kind: str) -> None:
    """Phi 4 mini: three quarters of a head turn, 64 positions were trained, 256 are offered."""
    rope = read(
        "Phi3ForCausalLM",
        rope_scaling=LONGROPE | {"type": kind},
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
    ).rope
    short, long = (inverse_frequencies(rope, 16, length) for length in (64, 65))
    assert short[0] == 1.0
    torch.testing.assert_close(long, short / 2)
    assert short[6:].tolist() == [0.0, 0.0]


def test_a_context_that_takes_the_factors_of_long_texts_is_told() -> None:
    config = read("Phi3ForCausalLM", rope_scaling={**LONGROPE, **FULL_FACTORS})
    assert config.warnings == ()
    original = {"original_max_position_embeddings": 64, "rope_scaling": {**LONGROPE, **FULL_FACTORS}}
    [warning] = read("Phi3ForCausalLM", **original).warnings
    assert "A context of 256 tokens" in warning
    assert "--max-model-len 64" in warning


@pytest.mark.parametrize(
    ("key", "value"),
    [("short_factor", [1.0] * 5), ("long_factor", None), ("long_factor", [1.0] * 5 + ["2"]), ("short_factor", [0] * 6)],
)
def test_a_long_rope_needs_a_factor_for_each_frequency(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"'rope_scaling.{key}' is .*a list of 6 numbers"):
        read("Phi3ForCausalLM", rope_scaling=LONGROPE | {key: value}, partial_rotary_factor=0.75)


def test_an_odd_part_of_a_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor' is 0.35.*even number of 16"):
        read("Phi3ForCausalLM", partial_rotary_factor=0.2, rope_scaling={"partial_rotary_factor": 0.35})


def test_yarn_stretches_a_context_left_at_its_original_length() -> None:
    """Qwen 2.5's advice for long texts adds rope_scaling and leaves max_position_embeddings."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read("Qwen2ForCausalLM", rope_scaling=yarn).max_position == 1024
    assert read("Qwen2ForCausalLM", rope_scaling=yarn, max_position_embeddings=1024).max_position == 1024


HYBRID = "Qwen3_5ForCausalLM"


def test_every_fourth_layer_of_a_qwen3_5_is_full_unless_it_says_otherwise() -> None:
    config = read(HYBRID, num_hidden_layers=8)
    assert config.recurrent_layers == (0, 1, 2, 4, 5, 6)
    assert config.paged_groups == (CacheGroup((3, 7)),)
    assert [group.kind for group in config.cache_groups] == [CacheKind.FULL, CacheKind.RECURRENT]
    assert read(HYBRID, full_attention_interval=2).recurrent_layers == (0, 2)
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert read(HYBRID, layer_types=types).recurrent_layers == (1, 2)
    assert config.rope.rotary_dim == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "at least one 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "'full_attention' or 'linear_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "a list of 4"),
        ({"linear_num_key_heads": 3}, "'linear_num_value_heads' is 32 and 'linear_num_key_heads' is 3"),
        ({"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim' is 1"),
    ],
)
def test_a_hybrid_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(HYBRID, **fields)


def test_the_text_part_of_a_qwen3_5_is_tied_where_the_whole_says_so() -> None:
    whole = {"text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4}, "tie_word_embeddings": True}
    config = read_model_config(whole, "Qwen3_5ForConditionalGeneration")
    assert config.is_text_part
    assert config.tie_word_embeddings
    assert (config.vocab_size, config.head_dim, config.recurrent_layers) == (248320, 256, (0, 1, 2))


def test_every_layer_of_a_qwen3_5_mixture_has_experts_and_a_shared_one() -> None:
    config = read_model_config({"num_hidden_layers": 4}, "Qwen3_5MoeForCausalLM")
    assert config.mixture == MixtureConfig(frozenset(range(4)), 256, 8, 512, True, 512)
    assert (config.hidden_size, config.num_kv_heads, config.recurrent_layers) == (2048, 2, (0, 1, 2))
