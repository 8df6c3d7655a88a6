"""GGUF files of every architecture they are read for: logits equal transformers' of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from appliance.config import EngineConfig
from appliance.engine.model_runner import ModelRunner
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.formats.canonical import save_canonical
from tests.models.test_logits import assert_close, make_request, run
from tests.models.tiny import FAMILIES
from tests.quant.gguf_writer import (
    LARGE,
    LAYERS,
    SMALL,
    VOCAB,
    Shape,
    interleave,
    llama3_factors,
    mixed,
    mixture,
    weights,
    write_gguf,
)

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def add_what_differs(tensors: dict[str, Any], architecture: str, shape: Shape) -> None:
    """From a Llama with the rows of q and k in Hugging Face's order to what a file of the architecture holds."""
    generator = np.random.default_rng(1)
    for layer in range(LAYERS):
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            stem = f"blk.{layer}.attn_{name}"
            if architecture in ("llama", "mistral3") and name != "v":
                tensors[f"{stem}.weight"] = interleave(tensors[f"{stem}.weight"], heads)
            if architecture in ("qwen2", "qwen2moe"):
                tensors[f"{stem}.bias"] = generator.standard_normal(heads * shape.head_dim, dtype=np.float32)
            if architecture in ("qwen3", "qwen3moe") and name != "v":
                tensors[f"{stem}_norm.weight"] = generator.standard_normal(shape.head_dim, dtype=np.float32)


def stacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the experts of each layer in one tensor, as transformers has them."""
    plain = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] + ".experts" for name in state if ".experts." in name}:
        count = sum(name.startswith(prefix) for name in state) // 3
        gate, up, down = (
            torch.stack([state[f"{prefix}.{index}.{part}_proj.weight"] for index in range(count)])
            for part in ("gate", "up", "down")
        )
        plain |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return plain


def assert_logits_equal_transformers(path: Path, rope: dict[str, Any] | None = None) -> None:
    """transformers' own model of the dequantised weights; rope: what the file's scaling means to it."""
    checkpoint = open_checkpoint(path)
    make_config, make_model = FAMILIES[checkpoint.config["model_type"]]
    config = {key: value for key, value in checkpoint.config.items() if key not in ("rope_theta", "rope_scaling")}
    parameters = {"rope_type": "default", "rope_theta": 50000.0, **(rope or {})}
    reference = make_model(make_config(**{**config, "attention_bias": False, "rope_parameters": parameters}))
    state = stacked({name: checkpoint.tensor(name).float() for name in checkpoint.names()})
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()

    runner = ModelRunner(EngineConfig(str(path), dtype="float32", num_kv_blocks=8), lambda stage, done: None)
    tokens = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = torch.nn.Module.eval(reference)(torch.tensor([tokens])).logits[0]
    request = make_request(tokens[:39], tokens[39:], [3, 0, 7], runner)
    assert_close(run(runner, [request], [39])[0], expected[38])
    assert_close(run(runner, [request], [1])[0], expected[39])


@pytest.mark.parametrize("architecture", ["llama", "mistral3", "qwen2", "qwen3"])
def test_logits_equal_transformers(tmp_path: Path, architecture: str) -> None:
    tensors: dict[str, Any] = {name: tensor * 0.3 for name, tensor in weights().items()}
    add_what_differs(tensors, architecture, SMALL)
    kinds = {f"blk.{layer}.{name}.weight": Kind.Q4_1 for layer in range(LAYERS) for name in MATRICES}
    kinds["token_embd.weight"] = Kind.Q8_0
    path = write_gguf(tmp_path / "m.gguf", tensors, kinds, architecture=architecture)
    assert_logits_equal_transformers(path)


@pytest.mark.parametrize("architecture", ["llama", "mistral3", "qwen2", "qwen3"])
@pytest.mark.parametrize(("most", "few"), [(Kind.Q2_K, Kind.Q3_K), (Kind.Q4_K, Kind.Q6_K), (Kind.Q5_K, Kind.Q6_K)])
def test_logits_of_mixed_files_equal_transformers(tmp_path: Path, architecture: str, most: Kind, few: Kind) -> None:
    tensors: dict[str, Any]
    tensors, kinds = mixed(most, few)
    add_what_differs(tensors, architecture, LARGE)
    path = write_gguf(tmp_path / "m.gguf", tensors, kinds, architecture=architecture, shape=LARGE)
    assert_logits_equal_transformers(path)


def test_logits_of_scaled_rotary_frequencies_equal_transformers(tmp_path: Path) -> None:
    """Llama 3's frequencies as convert_hf_to_gguf.py stores them: what each is divided by."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    tensors: dict[str, Any] = {name: tensor * 0.3 for name, tensor in weights().items()}
    add_what_differs(tensors, "llama", SMALL)
    tensors["rope_freqs.weight"] = llama3_factors(SMALL.head_dim, 50000.0, 8.0)
    assert_logits_equal_transformers(write_gguf(tmp_path / "m.gguf", tensors, {}), rope)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_logits_of_scaled_positions_equal_transformers(tmp_path: Path, kind: str) -> None:
    metadata: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"] = 32
    tensors: dict[str, Any] = {name: tensor * 0.3 for name, tensor in weights().items()}
    add_what_differs(tensors, "qwen2", SMALL)
    path = write_gguf(tmp_path / "m.gguf", tensors, {}, architecture="qwen2", metadata=metadata)
    assert_logits_equal_transformers(path, rope)


def write_mixture(path: Path, architecture: str, kind: Kind) -> Path:
    """Mixtral's files say llama; the first layer of the others is dense."""
    tensors: dict[str, Any] = {name: tensor * 0.3 for name, tensor in weights().items()}
    add_what_differs(tensors, architecture, SMALL)
    for layer in range(0 if architecture == "llama" else 1, LAYERS):
        mixture(tensors, layer, has_shared=architecture == "qwen2moe")
    kinds = {name: kind for name, tensor in tensors.items() if tensor.ndim > 1 and "inp" not in name}
    metadata = {"expert_count": 8, "expert_used_count": 3}
    return write_gguf(path, tensors, kinds, architecture=architecture, metadata=metadata)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.BF16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "qwen3moe"])
def test_logits_of_mixtures_equal_transformers(tmp_path: Path, architecture: str, kind: Kind) -> None:
    path = write_mixture(tmp_path / "m.gguf", architecture, kind)
    config = open_checkpoint(path).config
    assert config["num_experts"] == 8
    assert config["norm_topk_prob"] is (architecture == "qwen3moe")
    assert_logits_equal_transformers(path)


def test_a_converted_mixture_is_the_same(tmp_path: Path) -> None:
    original = open_checkpoint(write_mixture(tmp_path / "m.gguf", "qwen2moe", Kind.Q4_1))
    save_canonical(original, tmp_path / "copy")
    copy = open_checkpoint(tmp_path / "copy")
    assert copy.config == original.config
    assert copy.names() == original.names()
    assert all(torch.equal(copy.tensor(name), original.tensor(name)) for name in copy.names())
