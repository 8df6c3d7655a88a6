"""Mixtures of experts: routing, and that a row's result is the row's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from appliance.config import EngineConfig
from appliance.engine.kv_cache import step_bytes
from appliance.engine.model_runner import ModelRunner
from appliance.errors import CheckpointError
from appliance.kernels.cpu_backend import CpuBackend
from appliance.kernels.spec import Target
from appliance.models.mixture import Mixture
from appliance.models.registry import architecture_of, read_model_config
from appliance.models.weights import WeightReader
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.models.test_logits import make_request, run
from tests.models.tiny import GROUP_SIZE, save_tiny
from tests.quant.awq_writers import awq_config, gemm
from tests.quant.compressed_tensors_writer import compressed_config, compressed_tensors, group

SHAPE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
HIDDEN = 64
ROUTER = "model.layers.0.mlp.gate.weight"


def open_mixture(folder: Path, dtype: torch.dtype = torch.float32, keep_dense: bool = True) -> Mixture:
    checkpoint = open_checkpoint(folder)
    config = read_model_config(checkpoint.config, architecture_of(checkpoint.config))
    assert config.mixture is not None
    weights = WeightReader(checkpoint, Target("cpu", dtype, keep_dense), config.names)
    return Mixture(config.mixture, weights, CpuBackend(), "model.layers.0", config.hidden_size)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def reference(mixture: Mixture, x: Tensor) -> Tensor:
    """Every expert on every row, in float32, times its share, which is zero for those not chosen."""
    scores = mixture.router(x)
    shares, chosen = scores.softmax(-1).topk(mixture.config.top_k)
    weights = torch.zeros_like(scores).scatter(1, chosen, shares)
    y = torch.zeros_like(x)
    for index, expert in enumerate(mixture.experts):
        gate, up = expert.gate_up(x, 0).chunk(2, -1)
        y += weights[:, index : index + 1] * expert.down(torch.nn.functional.silu(gate) * up, 0)
    return y


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("liked", [[4], [7, 0, 3]], ids=["one", "three"])
def test_rows_that_all_choose_alike_leave_the_other_experts_out(tmp_path: Path, top_k: int, liked: list[int]) -> None:
    """All rows prefer these experts, in this order."""
    save_tiny(tmp_path, "qwen3_moe", **SHAPE | {"num_experts_per_tok": top_k})
    router = torch.zeros(8, HIDDEN)
    router[liked, 0] = torch.tensor([40.0 - place for place in range(len(liked))])
    change(tmp_path, lambda tensors: tensors.update({ROUTER: router}))
    mixture = open_mixture(tmp_path)
    x = rows(300).abs()
    torch.testing.assert_close(mixture(x, 0), reference(mixture, x), rtol=1e-4, atol=1e-4)


SHARED = {"shared_expert_intermediate_size": 96}
MODES: dict[str, tuple[bool, torch.dtype, bool]] = {
    "exact": (False, torch.float32, True),
    "exact_quantized": (True, torch.float32, True),
    "bfloat16": (False, torch.bfloat16, True),
    "quantized": (True, torch.bfloat16, True),
    "quantized_without_dense_copy": (True, torch.bfloat16, False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_row_is_bit_equal_alone_and_in_any_batch(tmp_path: Path, mode: str, phase: str) -> None:
    is_quantized, dtype, keep_dense = MODES[mode]
    save_tiny(tmp_path, "qwen2_moe", is_quantized=is_quantized, **SHAPE | SHARED)
    mixture = open_mixture(tmp_path, dtype, keep_dense)
    x = rows(300).to(dtype)

    def compute(part: Tensor) -> Tensor:
        return mixture(part, len(part) if phase == "decode" else 0)

    together = compute(x)
    assert together.dtype == dtype
    for start, stop in (*((row, row + 1) for row in range(24)), (3, 5), (1, 8), (40, 73), (11, 299)):
        assert torch.equal(compute(x[start:stop]), together[start:stop])
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(compute(x[shuffled]), together[shuffled])


def as_awq(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    return gemm(module, weight.codes.long(), weight.zeros, weight.scales.half())


def as_compressed_tensors(module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    return compressed_tensors(weight.codes.long(), weight.zeros, weight.scales.half(), 4, module=module)


FORMATS: dict[str, tuple[Callable[[str, QuantizedWeight], dict[str, Tensor]], dict[str, Any]]] = {
    "awq": (as_awq, awq_config(GROUP_SIZE)),
    "compressed-tensors": (as_compressed_tensors, compressed_config(group(4, GROUP_SIZE, symmetric=False))),
}


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_the_same_in_every_format(tmp_path: Path, name: str) -> None:
    write, quantization = FORMATS[name]
    save_tiny(tmp_path, "mixtral", is_quantized=True, num_local_experts=4, intermediate_size=32)
    x = rows(20)
    expected = open_mixture(tmp_path)(x, 0)
    checkpoint = open_checkpoint(tmp_path)
    tensors: dict[str, Tensor] = {}
    for parameter in checkpoint.names():
        module = parameter.removesuffix(".weight")
        weight = checkpoint.linear(module)
        tensors |= write(module, weight) if isinstance(weight, QuantizedWeight) else {parameter: weight}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert open_checkpoint(tmp_path).report.format == name
    assert torch.equal(open_mixture(tmp_path)(x, 0), expected)


def test_a_mixed_step_runs_each_row_by_its_phase(tmp_path: Path) -> None:
    """One expert's rows are of both phases, and each goes through its own kernel."""
    save_tiny(tmp_path, "qwen3_moe", is_quantized=True, **SHAPE)
    mixture = open_mixture(tmp_path, torch.bfloat16)
    x = rows(40).bfloat16()
    as_decodes, as_prefill, mixed = mixture(x, 40), mixture(x, 0), mixture(x, 13)
    assert torch.equal(mixed[:13], as_decodes[:13])
    assert torch.equal(mixed[13:], as_prefill[13:])
    assert not torch.equal(as_decodes, as_prefill)


def test_a_row_that_is_not_a_number_stays_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", **SHAPE)
    mixture = open_mixture(tmp_path)
    x = rows(9)
    expected = mixture(x, 0)
    x[4] = torch.nan
    y = mixture(x, 0)
    assert y[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(y[others], expected[others])


def test_a_models_logits_are_bit_equal_alone_and_in_a_batch(tmp_path: Path) -> None:
    """In the exact mode, over prefill in chunks, decode and a layer of each kind."""
    save_tiny(tmp_path, "qwen3_moe", mlp_only_layers=[1], **SHAPE)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(131, (n,), generator=generator).tolist() for n in (33, 20, 27, 18, 40)]

    def logits(indices: list[int]) -> list[Tensor]:
        runner = ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=32), lambda stage, done: None)
        requests = [make_request(tokens[i], [5, 9], [4 * i + j for j in range(4)], runner) for i in indices]
        prefill = run(runner, requests, [len(tokens[i]) for i in indices])
        decodes = [run(runner, requests, [1] * len(indices)) for _ in range(2)]
        return [torch.stack([prefill[n], *(d[n] for d in decodes)]) for n in range(len(indices))]

    together = logits(list(range(5)))
    for index in range(5):
        assert torch.equal(logits([index])[0], together[index])


def test_memory_counts_every_expert(tmp_path: Path) -> None:
    """A dense layer, and one of eight experts and a shared one; biases of q, k and v."""
    save_tiny(tmp_path, "qwen2_moe", mlp_only_layers=[0], **SHAPE | SHARED)
    config = read_model_config(open_checkpoint(tmp_path).config, "Qwen2MoeForCausalLM")
    attention, dense = 16 * 2 * (4 + 2), 3 * 96
    mixture = 8 * (3 * 32 + 1) + 3 * 96 + 1
    assert config.linear_parameters == HIDDEN * (2 * attention + dense + mixture)
    runner = ModelRunner(EngineConfig(str(tmp_path), dtype="float32", num_kv_blocks=8), lambda stage, done: None)
    others = 2 * 131 * HIDDEN + 5 * HIDDEN + 2 * 16 * (4 + 2 + 2)
    assert runner.loaded.memory.weights == 4 * (config.linear_parameters + others)


def test_a_step_needs_more_memory_the_more_experts_a_row_has(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", **SHAPE)
    fields = open_checkpoint(tmp_path).config

    def needed(top_k: int) -> int:
        config = read_model_config(fields | {"num_experts_per_tok": top_k}, "Qwen3MoeForCausalLM")
        return step_bytes(config, EngineConfig("", max_num_batched_tokens=100), 1, torch.float32)

    # Inputs gathered, gate and up in parts and together.
    assert needed(8) - needed(4) == 4 * 100 * (HIDDEN + 4 * 32) * 4


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
STACK = "model.layers.0.mlp.experts.down_proj"
DAMAGES: dict[str, tuple[bool, Callable[[dict[str, Tensor]], object], str]] = {
    "no router": (False, lambda t: t.pop(ROUTER), r"no router 'model.layers.0.mlp.gate'"),
    "no expert": (False, lambda t: t.pop(EXPERT), r"no layer 'model.layers.0.mlp.experts.3.up_proj'"),
    "other router": (
        False,
        lambda t: t.update({ROUTER: torch.zeros(6, HIDDEN)}),
        r"mlp.gate' has 64 inputs and 6 outputs, config.json says 64 and 8",
    ),
    "no half of a stack": (True, lambda t: t.pop(STACK), "holds no tensor " + STACK),
    "other stack": (
        True,
        lambda t: t.update({STACK: torch.zeros(6, HIDDEN, 32)}),
        r"down_proj' is torch.float32 of shape \(6, 64, 32\): 16- or 32-bit floats of shape \(8, 64, 32\)",
    ),
    "8-bit stack": (True, lambda t: t.update({STACK: t[STACK].to(torch.float8_e4m3fn)}), "is torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    is_stacked, edit, message = DAMAGES[damage]
    save_tiny(tmp_path, "qwen3_moe", is_stacked=is_stacked, **SHAPE)
    change(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        open_mixture(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 9}, r"'num_experts_per_tok' is 9 and 'num_local_experts' is 8: the first must be at"),
        ({"num_local_experts": 0}, r"'num_local_experts' is 0"),
        ({"moe_intermediate_size": "32"}, r"'moe_intermediate_size' is '32'"),
        ({"mlp_only_layers": 1}, r"'mlp_only_layers' is 1: expected a list of layers"),
        ({"decoder_sparse_step": 0}, r"'decoder_sparse_step' is 0"),
    ],
    ids=str,
)
def test_config_contradictions_are_named(fields: dict[str, Any], message: str) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 131,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    }
    with pytest.raises(CheckpointError, match=message):
        read_model_config(config | fields, "Qwen3MoeForCausalLM")
