"""Checkpoints that hold q, k and v, or gate and up, as one layer, and those that hold the same apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.config import EngineConfig
from appliance.engine.model_runner import ModelRunner
from appliance.errors import CheckpointError
from appliance.models.mlp import Mlp
from appliance.models.self_attention import SelfAttention
from tests.models.test_logits import assert_close, make_request, run
from tests.models.tiny import save_tiny

TOKENS = torch.randint(131, (21,), generator=torch.Generator().manual_seed(5)).tolist()


def open_runner(folder: Path) -> ModelRunner:
    return ModelRunner(EngineConfig(str(folder), dtype="float32", num_kv_blocks=8), lambda stage, done: None)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_layer_that_is_one_on_disk_stays_one(tmp_path: Path, factor: float, is_quantized: bool) -> None:
    """Also where its outputs are put in another order, for heads that turn in part."""
    save_tiny(tmp_path, "phi3", is_quantized=is_quantized, partial_rotary_factor=factor)
    layer = open_runner(tmp_path).model.layers[0]
    assert isinstance(layer.mixer, SelfAttention)
    assert [part.name for part in layer.mixer.qkv.parts] == ["model.layers.0.self_attn.qkv_proj"]
    assert isinstance(layer.mlp, Mlp)
    assert [part.name for part in layer.mlp.gate_up.parts] == ["model.layers.0.mlp.gate_up_proj"]
    assert layer.mixer.qkv.parts[0].plan.spec.bits == (4 if is_quantized else 32)


def test_halves_apart_are_the_whole(tmp_path: Path) -> None:
    """GPTQModel writes gate and up of a Phi apart, and leaves q, k and v one layer."""
    reference = save_tiny(tmp_path, "phi3")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "gate_up_proj" in name]:
        for part, half in zip(("gate_proj", "up_proj"), tensors.pop(name).chunk(2), strict=True):
            tensors[name.replace("gate_up_proj", part)] = half.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0, -1]
    runner = open_runner(tmp_path)
    assert_close(run(runner, [make_request(TOKENS, [], [0, 1], runner)], [21])[0], expected)


def test_a_whole_of_another_size_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "phi3")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_key_value_heads": 2', '"num_key_value_heads": 4'))
    with pytest.raises(CheckpointError, match=r"qkv_proj' has 64 inputs and 128 outputs, config.json says 64 and 192"):
        open_runner(tmp_path)
