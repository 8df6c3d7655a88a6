"""GPTQ files whose modules differ: bits and groups of their own, plain layers, what a configuration says of single
modules, and folders from before Hugging Face's names.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.quant.checkpoint import Checkpoint, open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.writers import (
    exact_weight,
    gptq_config,
    gptq_tensors,
    gptqmodel_zero_words,
    random_integers,
    write_folder,
)

K, N, GROUP = 128, 64, 32
PROJECTIONS = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")


def packed(module: str, bits: int = 4, group_size: int = GROUP) -> tuple[dict[str, Tensor], Tensor]:
    """A module's tensors and its exact weight."""
    codes, zeros, scales = random_integers(K, N, K // group_size, bits=bits)
    order = torch.arange(K) // group_size
    words = gptqmodel_zero_words(zeros, bits)
    return gptq_tensors(codes, words, scales, order, module, bits), exact_weight(codes, zeros, scales, order)


def model(
    specs: dict[str, tuple[int, int]], plain: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of modules with (bits, group size) and of plain ones, and all their exact weights."""
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for module, (bits, group_size) in specs.items():
        parts, exact[module] = packed(module, bits, group_size)
        tensors |= parts
    for module in plain:
        tensors[f"{module}.weight"] = torch.randn(N, K).half()
        exact[module] = tensors[f"{module}.weight"].double()
    return tensors, exact


def layers(count: int, **others: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Projections of layers, 4-bit in groups of 32 but where the layer's number says otherwise (`_1`)."""
    return {f"model.layers.{n}.{name}": others.get(f"_{n}", (4, GROUP)) for n in range(count) for name in PROJECTIONS}


def assert_exact(checkpoint: Checkpoint, exact: dict[str, Tensor]) -> None:
    for module, weight in exact.items():
        assert torch.equal(checkpoint.tensor(f"{module}.weight").double(), weight), module


def test_layers_of_their_own_width_and_group_plain_ones_and_a_quantised_lm_head_are_each_read_as_stored(
    tmp_path: Path,
) -> None:
    specs = layers(6, _1=(8, 64), _2=(8, 64)) | {"lm_head": (8, 64)}
    del specs["model.layers.3.mlp.down_proj"]
    tensors, exact = model(specs, ("model.layers.3.mlp.down_proj", "model.embed_tokens"))
    rules = {
        r"-:.*\.3\.mlp\.down_proj": {},
        r"+:model\.layers\.[12]\.": {"bits": 8, "group_size": 64},
        "lm_head": {"bits": 8, "group_size": 64},
    }
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, gptq_config(GROUP, dynamic=rules, lm_head=True)))
    assert_exact(checkpoint, exact)
    assert isinstance(checkpoint.linear("lm_head"), QuantizedWeight)
    report = checkpoint.report
    assert report.describe() == "GPTQ 4-bit, group 32, asymmetric"
    assert report.exceptions == (
        "lm_head 8-bit group 64",
        "model.layers.1-2.* 8-bit group 64",
        "model.layers.3.mlp.down_proj not quantised",
    )
    assert report.warnings == ()


@pytest.mark.parametrize("listed", [[["self_attn.q_proj"], ["mlp.up_proj"]], ["self_attn.q_proj", "mlp.up_proj"], None])
def test_modules_left_out_of_a_block_s_list_are_plain(tmp_path: Path, listed: Any) -> None:
    specs = {name: spec for name, spec in layers(2).items() if "down_proj" not in name}
    plain = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head")
    tensors, exact = model(specs, plain)
    quantization = gptq_config(GROUP) | ({} if listed is None else {"modules_in_block_to_quantize": listed})
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, quantization))
    assert_exact(checkpoint, exact)
    assert checkpoint.report.exceptions == ("model.layers.*.mlp.down_proj not quantised", "lm_head not quantised")
    assert checkpoint.report.warnings == ()


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({r".*up_proj": {"bits": 8}}, "says 8 bits for model.layers.0.mlp.up_proj, but the shapes of its qweight"),
        ({r".*up_proj": {"group_size": 64}}, "says group_size 64, which makes 2 groups of the 128 inputs of model"),
        ({r".*up_proj": {"bits": 4}, r".*\.mlp\.": {"bits": 8}}, "says 8 bits for model.layers.0.mlp.down_proj"),
        ({r".*up_proj": {"pack_dtype": "int64"}}, "says pack_dtype int64, but model.layers.0.mlp.up_proj.qweight"),
        ({r".*up_proj": {"bits": "8"}}, "dynamic '.*up_proj': bits is '8'"),
        ({r".*up_proj": 8}, "dynamic '.*up_proj' is 8, an object of settings was expected"),
        ([], None),
        ({}, None),
        (["x"], "dynamic is a list, an object was expected"),
        ({"up_proj": {"bits": 8}}, None),  # patterns start at the start of the name
        ({"-:.*up_proj(": {}}, "'.*up_proj(' is not a regular expression over module names"),
        ({r".*up_proj": {"bits": 8}, r"-:.*\.up_proj": {}}, None),  # exclusions come first
        ({r".*up_proj": {"bits": 4}, r".*up_proj$": {"bits": 8}}, None),  # then the first that matches
    ],
)
def test_what_dynamic_says_of_a_module_is_checked_against_it(tmp_path: Path, rules: Any, said: str | None) -> None:
    tensors, exact = model(layers(1))
    folder = write_folder(tmp_path, tensors, gptq_config(GROUP, dynamic=rules))
    if said is None:
        assert_exact(open_checkpoint(folder), exact)
    else:
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(folder)
        assert said in raised.value.message


def test_a_quantised_module_that_dynamic_excludes_is_reported_and_read(tmp_path: Path) -> None:
    tensors, exact = model(layers(1))
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, gptq_config(GROUP, dynamic={r"-:.*up_proj": {}})))
    assert_exact(checkpoint, exact)
    (warning,) = checkpoint.report.warnings
    assert (
        "excludes 1 modules from quantisation that are quantised (the first is model.layers.0.mlp.up_proj)" in warning
    )


def test_a_pattern_made_to_match_for_ever_is_refused_in_time(tmp_path: Path) -> None:
    tensors, _ = packed("a" * 60 + ".up_proj")
    folder = write_folder(tmp_path, tensors, gptq_config(GROUP, dynamic={"(a|aa)+$": {"bits": 8}}))
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"'\(a\|aa\)\+\$' takes more than 0\.5 seconds"):
        open_checkpoint(folder)
    assert time.monotonic() - started < 20


def test_a_plain_copy_beside_packed_words_is_not_read(tmp_path: Path) -> None:
    tensors, exact = model({"lm_head": (4, GROUP)})
    tensors["lm_head.weight"] = torch.zeros(N, K).half()
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, gptq_config(GROUP)))
    assert checkpoint.names() == ["lm_head.weight"]
    assert_exact(checkpoint, exact)


@pytest.mark.parametrize("stray", [False, True])
def test_a_folder_of_autogptq_s_own_names_is_read(tmp_path: Path, stray: bool) -> None:
    tensors, exact = model(layers(1))
    write_folder(tmp_path, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    quantization: dict[str, Any] = {
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
        "damp_percent": 0.01,
    }
    if stray:
        (tmp_path / "adapter.safetensors").write_bytes((tmp_path / "gptq_model-4bit-32g.safetensors").read_bytes())
        quantization["model_file_base_name"] = "gptq_model-4bit-32g"
    (tmp_path / "quantize_config.json").write_text(json.dumps(quantization))
    checkpoint = open_checkpoint(tmp_path)
    assert_exact(checkpoint, exact)
    assert "quantize_config.json says no method, 4 bits" in checkpoint.report.evidence
