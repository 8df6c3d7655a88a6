"""GGUF files of every architecture they are read for: logits equal transformers' of the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from appliance.config import EngineConfig
from appliance.engine.model_runner import ModelRunner
from appliance.quant.checkpoint import open_checkpoint
from tests.models.test_logits import assert_close, make_request, run
from tests.models.tiny import FAMILIES
from tests.quant import gguf_writer
from tests.quant.gguf_writer import HEAD_DIM, HEADS, KV_HEADS, interleave, weights, write_gguf

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write(path: Path, architecture: str) -> Path:
    """Q4_1 matrices, and what the architecture adds to a Llama."""
    tensors = {name: tensor * 0.3 for name, tensor in weights().items()}
    kinds = {"token_embd.weight": Kind.Q8_0}
    generator = np.random.default_rng(1)
    for layer in range(gguf_writer.LAYERS):
        kinds |= {f"blk.{layer}.{name}.weight": Kind.Q4_1 for name in MATRICES}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            stem = f"blk.{layer}.attn_{name}"
            if architecture == "llama" and name != "v":
                tensors[f"{stem}.weight"] = interleave(tensors[f"{stem}.weight"], heads)
            if architecture == "qwen2":
                tensors[f"{stem}.bias"] = generator.standard_normal(heads * HEAD_DIM, dtype=np.float32)
            if architecture == "qwen3" and name != "v":
                tensors[f"{stem}_norm.weight"] = generator.standard_normal(HEAD_DIM, dtype=np.float32)
    return write_gguf(path, tensors, kinds, architecture=architecture)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(tmp_path: Path, architecture: str) -> None:
    path = write(tmp_path / "m.gguf", architecture)
    checkpoint = open_checkpoint(path)
    make_config, make_model = FAMILIES[architecture]
    reference = make_model(make_config(**{**checkpoint.config, "attention_bias": False}))
    state = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()

    runner = ModelRunner(EngineConfig(str(path), dtype="float32", num_kv_blocks=8), lambda stage, done: None)
    tokens = torch.randint(gguf_writer.VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = torch.nn.Module.eval(reference)(torch.tensor([tokens])).logits[0]
    request = make_request(tokens[:39], tokens[39:], [3, 0, 7])
    assert_close(run(runner, [request], [39])[0], expected[38])
    assert_close(run(runner, [request], [1])[0], expected[39])
