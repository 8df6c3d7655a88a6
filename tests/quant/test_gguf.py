"""GGUF files: every type bit for bit what the gguf package's own dequantiser gives, names and rows in our order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from appliance.errors import ApplianceError, CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant import gguf_writer
from tests.quant.gguf_writer import LARGE, SMALL, interleave, llama3_factors, mixed, weights, write_gguf

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
    "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
    "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}


def matrices_as(kind: Kind) -> dict[str, Kind]:
    kinds = {f"blk.{layer}.{name}.weight": kind for layer in range(gguf_writer.LAYERS) for name in MATRICES}
    return kinds | {"token_embd.weight": Kind.Q8_0}


def reference(path: Path, name: str) -> Tensor:
    """The gguf package's own reading of a tensor, as stored."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.F16, Kind.BF16, Kind.F32])
def test_every_tensor_equals_the_packages_dequantiser(tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights(), matrices_as(kind))
    checkpoint = open_checkpoint(path)
    for name, hf_name in HF_NAMES.items():
        assert torch.equal(checkpoint.tensor(hf_name).float(), reference(path, name)), name
    assert len(checkpoint.names()) == len(weights())


def test_a_block_of_zero_scale_is_exact(tmp_path: Path) -> None:
    tensors = weights()
    tensors["blk.0.ffn_up.weight"][3] = 0.25  # constant: d = 0, m = 0.25
    path = write_gguf(tmp_path / "m.gguf", tensors, matrices_as(Kind.Q4_1))
    read = open_checkpoint(path).tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(read, reference(path, "blk.0.ffn_up.weight"))
    assert bool((read[3] == 0.25).all())


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.F32])
def test_rows_of_q_and_k_of_a_llama_are_put_back_in_order(tmp_path: Path, kind: Kind) -> None:
    tensors = weights()
    plain = write_gguf(tmp_path / "plain.gguf", tensors, matrices_as(kind))  # rows as Hugging Face has them
    for name, heads in (("attn_q", SMALL.heads), ("attn_k", SMALL.kv_heads)):
        tensors[f"blk.0.{name}.weight"] = interleave(tensors[f"blk.0.{name}.weight"], heads)
        tensors[f"blk.0.{name}.bias"] = interleave(np.arange(heads * 16, dtype=np.float32), heads)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, matrices_as(kind)))
    for name, module, heads in (("attn_q", "q_proj", SMALL.heads), ("attn_k", "k_proj", SMALL.kv_heads)):
        read = checkpoint.tensor(f"model.layers.0.self_attn.{module}.weight")
        assert torch.equal(read, reference(plain, f"blk.0.{name}.weight"))
        bias = checkpoint.tensor(f"model.layers.0.self_attn.{module}.bias")
        assert torch.equal(bias, torch.arange(heads * 16).float())
    assert checkpoint.config["attention_bias"] is True


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_scaling_of_llama_3_is_found_from_its_factors(tmp_path: Path, factor: float) -> None:
    tensors = weights() | {"rope_freqs.weight": llama3_factors(SMALL.head_dim, 50000.0, factor)}
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, {})).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_factors_that_are_no_plain_numbers_are_refused(tmp_path: Path) -> None:
    tensors = weights() | {"rope_freqs.weight": llama3_factors(SMALL.head_dim, 50000.0, 8.0)}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is F16, F32 was expected"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, {"rope_freqs.weight": Kind.F16}))


@pytest.mark.parametrize("factors", ["of 4096", "infinite", "too few"])
def test_factors_that_are_not_those_of_llama_3_are_refused(tmp_path: Path, factors: str) -> None:
    found = llama3_factors(SMALL.head_dim, 50000.0, 8.0, original=4096 if factors == "of 4096" else 8192)
    if factors == "infinite":
        found[-1] = np.inf
    tensors = weights() | {"rope_freqs.weight": found[:-1] if factors == "too few" else found}
    with pytest.raises(UnsupportedModelError, match="not those of Llama 3 scaled by"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, {}))


def test_a_mistral_has_no_window(tmp_path: Path) -> None:
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights(), {}, architecture="mistral3")).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], None)


def test_rows_of_q_and_k_of_a_qwen2_are_left_in_order(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights(), matrices_as(Kind.Q4_1), architecture="qwen2")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["architectures"] == ["Qwen2ForCausalLM"]
    read = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(read, reference(path, "blk.0.attn_q.weight"))


def test_linear_layers_stay_quantised(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights(), matrices_as(Kind.Q4_1)))
    weight = checkpoint.linear("model.layers.0.mlp.up_proj")
    assert isinstance(weight, QuantizedWeight)
    assert (weight.bits, weight.group_size, weight.K, weight.N) == (4, 32, 64, 96)
    assert weight.zeros is None
    embedding = checkpoint.linear("model.embed_tokens")
    assert isinstance(embedding, QuantizedWeight)
    assert (embedding.bits, embedding.group_size) == (8, 32)
    assert checkpoint.report.describe() == "GGUF Q4_1 4-bit, group 32"


def test_the_configuration_is_made_from_the_metadata(tmp_path: Path) -> None:
    tensors = weights()
    tied = open_checkpoint(write_gguf(tmp_path / "tied.gguf", tensors, {})).config
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    untied = open_checkpoint(write_gguf(tmp_path / "untied.gguf", tensors, {}))
    assert tied == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 50000.0,
        "max_position_embeddings": 128,
        "vocab_size": 40,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert untied.config["tie_word_embeddings"] is False
    assert torch.equal(untied.tensor("lm_head.weight"), torch.from_numpy(tensors["output.weight"]))
    assert untied.report.describe() == "GGUF, not quantised (F32)"


def test_a_mix_of_types_is_read_each_as_its_own(tmp_path: Path) -> None:
    """As Q4_K_M files are: attn_v, ffn_down and the embedding in Q6_K, the rest in Q4_K."""
    tensors, kinds = mixed(Kind.Q4_K, Kind.Q6_K)
    path = write_gguf(tmp_path / "m.gguf", tensors, kinds, shape=LARGE)
    checkpoint = open_checkpoint(path)
    for name, hf_name in HF_NAMES.items():
        assert torch.equal(checkpoint.tensor(hf_name).float(), reference(path, name)), name
    specs = {}
    for module in ("self_attn.v_proj", "self_attn.o_proj"):
        weight = checkpoint.linear(f"model.layers.0.{module}")
        assert isinstance(weight, QuantizedWeight)
        specs[module] = (weight.bits, weight.group_size)
    assert specs == {"self_attn.v_proj": (6, 16), "self_attn.o_proj": (4, 32)}
    report = checkpoint.report
    assert report.describe() == "GGUF Q4_K 4-bit, group 32, other layers Q6_K"
    assert (report.bits, report.group_size, report.symmetric) == (4, 32, False)
    assert report.evidence == ("tensors by type: 10 Q4_K, 5 Q6_K, 5 F32",)


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [(Kind.IQ2_XS, "Q2_K"), (Kind.IQ3_S, "Q3_K_M"), (Kind.IQ4_XS, "Q4_K_M"), (Kind.MXFP4, "Q4_K_M")],
)
def test_a_tensor_type_not_served_is_refused_by_name(tmp_path: Path, kind: Kind, nearest: str) -> None:
    tensors: dict[str, Any] = dict(weights(shape=LARGE))
    codes, size = gguf.GGML_QUANT_SIZES[kind]
    tensors["blk.0.ffn_up.weight"] = np.zeros((LARGE.intermediate, LARGE.hidden // codes * size), dtype=np.uint8)
    path = write_gguf(tmp_path / "m.gguf", tensors, {"blk.0.ffn_up.weight": kind}, shape=LARGE)
    said = rf"blk\.0\.ffn_up\.weight is {kind.name} .*, supported .* Q4_K.*: use the {nearest} file of the model$"
    with pytest.raises(UnsupportedModelError, match=said):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("architecture", "metadata", "extra", "said"),
    [
        ("mamba", {}, None, "architecture is 'mamba', served are llama"),
        ("qwen3", {"expert_count": 8}, None, "8 experts, qwen3 is served without"),
        ("llama", {"expert_count": 8}, None, r"8 experts in tensors blk\.N\.ffn_gate_exps\.weight .* found none"),
        ("qwen3moe", {"expert_count": 8, "expert_gating_func": 2}, None, "expert_gating_func 2, a mixture of experts"),
        ("llama", {"rope.dimension_count": 8}, None, "rotates 8 of 16"),
        ("llama", {}, "rope_freqs.weight", r"rope_freqs\.weight are not those of Llama 3 scaled by 2"),
        ("llama", {"rope.scaling.type": "longrope"}, None, "rotary scaling is 'longrope', linear and plain yarn"),
        (
            "mistral3",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 1.0},
            None,
            "'yarn' with yarn_log",
        ),
        ("llama", {"rope.scaling.type": "linear"}, None, "rope.scaling.factor is None, a number of at least 1"),
        (
            "llama",
            {"rope.scaling.type": "linear"},
            "rope_freqs.weight",
            "has both rope_freqs.weight and rotary scaling",
        ),
        ("mistral3", {"attention.temperature_scale": 0.1}, None, "attention of that kind is not served"),
        ("llama", {}, "blk.0.ssm_a.weight", r"tensor blk\.0\.ssm_a\.weight has no place"),
        ("llama", {"attention.head_count_kv": 1}, None, "has 32 rows, 1 heads of 16 make 16"),
        ("llama", {"block_count": 10**9}, None, "num_hidden_layers is 1000000000"),
        ("llama", {"rope.freq_base": -1.0}, None, r"rope\.freq_base is -1\.0, a positive number"),
        ("llama", {"attention.head_count": 0}, None, "attention.head_count is 0, a positive integer"),
    ],
)
def test_what_the_configuration_cannot_carry_is_refused(
    tmp_path: Path, architecture: str, metadata: dict[str, int | float | str], extra: str | None, said: str
) -> None:
    tensors = weights()
    if extra is not None:
        tensors[extra] = np.full(8, 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors, {}, architecture=architecture, metadata=metadata)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(path)


def test_damaged_stacks_of_experts_are_refused(tmp_path: Path) -> None:
    metadata: dict[str, int | float | str] = {"expert_count": 8, "expert_used_count": 2}

    def opened(change: dict[str, Any], metadata: dict[str, int | float | str] = metadata) -> None:
        tensors: dict[str, Any] = weights()
        for layer in range(gguf_writer.LAYERS):
            gguf_writer.mixture(tensors, layer)
        path = write_gguf(tmp_path / "m.gguf", tensors | change, {}, metadata=metadata)
        open_checkpoint(path)

    opened({})
    gate, up = "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"
    with pytest.raises(CheckpointError, match=r"8 experts in .* found blk\.1\.ffn_gate_exps\.weight \[6, 32, 64\]"):
        opened({gate: np.zeros((6, 32, 64), dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"ffn_up_exps\.weight is F32 \[256, 64\], .*: use another file"):
        opened({up: np.zeros((256, 64), dtype=np.float32)})
    with pytest.raises(CheckpointError, match="expert_used_count is missing"):
        opened({}, {"expert_count": 8})


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", weights(), {}, parts=3)
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        open_checkpoint(path)


def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", weights(), matrices_as(Kind.Q4_1)).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 37), len(whole) // 2, len(whole) - 40_000]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(path)


def test_an_array_that_claims_to_be_endless_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights(), {})
    content = bytearray(path.read_bytes())
    # After the key: the field's type and the elements' type, 4 bytes each, then the count.
    count = content.index(b"test.bytes") + len(b"test.bytes") + 8
    assert content[count] == 8
    content[count : count + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        open_checkpoint(path)


def test_without_the_gguf_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights(), {})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf needs the gguf package"):
        open_checkpoint(path)


def test_damaged_headers_end_in_an_error_of_ours_or_a_model(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", weights(), matrices_as(Kind.Q4_1)).read_bytes()
    generator = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for position in generator.integers(0, 2500, 3):
            damaged[position] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except ApplianceError:
            refused += 1
    assert refused > 50
