"""InternLM 2, which transformers has no model of: a Llama's weights under its names and in its order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from appliance.config import EngineConfig
from appliance.engine.model_runner import ModelRunner
from appliance.models.self_attention import SelfAttention
from tests.models.test_logits import assert_close, make_request, run
from tests.models.tiny import GROUP_SIZE, round_to_groups, save_tiny
from tests.quant.writers import exact_weight, gptq_config, gptq_tensors, gptqmodel_zero_words

NAMES = {
    "embed_tokens": "tok_embeddings",
    "o_proj": "wo",
    "self_attn": "attention",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "mlp": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def by_kv_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows as modeling_internlm2.py takes them apart: rearrange("(h gs d) -> h gs d"), k the last but one."""
    parts = [part.view(KV_HEADS, -1, HEAD_DIM, part.shape[-1]) for part in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 2)


def take_apart(wqkv: Tensor) -> tuple[Tensor, ...]:
    groups = wqkv.view(KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM, wqkv.shape[-1])
    q, k, v = groups[:, :-2], groups[:, -2], groups[:, -1]
    return q.flatten(0, 2), k.flatten(0, 1), v.flatten(0, 1)


def save_internlm2(folder: Path, is_quantized: bool) -> PreTrainedModel:
    """Its q, k and v alone are quantised, all else stays plain. Returns the Llama that computes the same."""
    model = save_tiny(folder)
    tensors = {}
    for name, tensor in model.state_dict().items():
        renamed = ".".join(NAMES.get(part, part) for part in name.split("."))
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            tensors["output.weight" if name == "lm_head.weight" else renamed] = tensor
    config = json.loads((folder / "config.json").read_text())
    for index, layer in enumerate(model.model.layers):
        attention, name = layer.self_attn, f"model.layers.{index}.attention.wqkv"
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        wqkv = by_kv_head(*(projection.weight.detach() for projection in projections))
        if not is_quantized:
            tensors[f"{name}.weight"] = wqkv
            continue
        order = torch.arange(wqkv.shape[1]) // GROUP_SIZE
        codes, zeros, scales = round_to_groups(wqkv.t(), 4)
        tensors |= gptq_tensors(codes, gptqmodel_zero_words(zeros, 4), scales, order, name, 4)
        config["quantization_config"] = gptq_config(GROUP_SIZE, bits=4, dynamic={})
        with torch.no_grad():
            for projection, weight in zip(
                projections, take_apart(exact_weight(codes, zeros, scales, order)), strict=True
            ):
                projection.weight.copy_(weight)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config |= {
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
        "bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("is_quantized", [False, True])
def test_logits_equal_those_of_a_llama(tmp_path: Path, is_quantized: bool) -> None:
    reference = save_internlm2(tmp_path, is_quantized)
    runner = ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=8), lambda stage, done: None)
    mixer = runner.model.layers[0].mixer
    assert isinstance(mixer, SelfAttention)
    assert [part.name for part in mixer.qkv.parts] == ["model.layers.0.attention.wqkv"]
    assert mixer.qkv.parts[0].plan.spec.is_quantized == is_quantized
    tokens = torch.randint(131, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    request = make_request(tokens[:38], tokens[38:], [3, 0, 7], runner)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    for rows, position in ((20, 19), (18, 37), (1, 38), (1, 39)):
        assert_close(run(runner, [request], [rows])[0], expected[position])
