"""AutoRound: GPTQ's words without g_idx in two encodings of zero points, AWQ's words, settings of single modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.awq_writers import gemm
from tests.quant.writers import MODULE, exact_weight, gptq_tensors, gptqmodel_zero_words, pack, random_integers
from tests.quant.writers import write_folder as write

# Packing -> the writer of its zero points: minus 1 in every field (a 0 borrows), or as they are.
MINUS_ONE = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2", "AUTO_ROUND:AUTO_GPTQ")
AS_THEY_ARE = ("auto_round", "auto_round:exllamav2", "auto_round:gptqmodel", "auto_round:tritonv2")
ZERO_WORDS = dict.fromkeys(MINUS_ONE, gptqmodel_zero_words) | dict.fromkeys(AS_THEY_ARE, lambda zeros: pack(zeros, 1))


def config(packing: str | None, **others: Any) -> dict[str, Any]:
    keys = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
    return keys | ({} if packing is None else {"packing_format": packing}) | others


def read(folder: Path, module: str = MODULE) -> Tensor:
    weight = open_checkpoint(folder).linear(module)
    assert isinstance(weight, QuantizedWeight)
    return weight.dequantize().double()


@pytest.mark.parametrize("packing", ZERO_WORDS)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_gptq_words_are_read_by_the_packing_s_encoding_of_zero_points(
    tmp_path: Path, packing: str, method: str
) -> None:
    codes, zeros, scales = random_integers(128, 64, 4, zeros=(0, 16))
    tensors = gptq_tensors(codes, ZERO_WORDS[packing](zeros), scales, None)
    key = "packing_format" if method == "auto-round" else "backend"
    folder = write(tmp_path, tensors, config(None, quant_method=method) | {key: packing})
    assert torch.equal(read(folder), exact_weight(codes, zeros, scales, torch.arange(128) // 32))
    assert open_checkpoint(folder).report.format == "gptq"


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", None])
def test_symmetric_words_are_version_1_by_default(tmp_path: Path, packing: str | None) -> None:
    codes, _, scales = random_integers(128, 64, 4)
    zeros = torch.full((4, 64), 8)
    folder = write(tmp_path, gptq_tensors(codes, pack(zeros - 1, 1), scales, None), config(packing, sym=True))
    assert torch.equal(read(folder), exact_weight(codes, zeros, scales, torch.arange(128) // 32))
    assert open_checkpoint(folder).report.warnings == ()


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq", "auto_round:awq:gemm", None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_words_are_read_as_awq(tmp_path: Path, packing: str | None, symmetric: bool) -> None:
    codes, zeros, scales = random_integers(128, 64, 4, zeros=(8, 9) if symmetric else (0, 16))
    folder = write(tmp_path, gemm(MODULE, codes, zeros, scales), config(packing, sym=symmetric))
    assert torch.equal(read(folder), exact_weight(codes, zeros, scales, torch.arange(128) // 32))
    report = open_checkpoint(folder).report
    assert (report.format, report.symmetric, report.warnings) == ("awq", symmetric, ())


def test_the_export_as_awq_is_awq_s_own_configuration(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(128, 64, 4)
    others = {"quant_method": "awq", "provider": "auto-round", "zero_point": True, "version": "gemm"}
    folder = write(tmp_path, gemm(MODULE, codes, zeros, scales), config(None, **others))
    assert torch.equal(read(folder), exact_weight(codes, zeros, scales, torch.arange(128) // 32))


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_single_modules_have_groups_of_their_own_or_are_not_quantised(tmp_path: Path, packing: str) -> None:
    """`extra_config`: names, regular expressions, 16 bits for what stays as it is, lm_head."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(64, 128, generator=generator).half()
    groups = {MODULE: 32, "lm_head": 64, "model.layers.1.mlp.up_proj": 128}
    tensors, expected = {"model.layers.2.mlp.up_proj.weight": plain}, {}
    for module, size in groups.items():
        codes, zeros, scales = random_integers(128, 64, 128 // size, zeros=(0, 16))
        expected[module] = exact_weight(codes, zeros, scales, torch.arange(128) // size)
        if "awq" in packing:
            tensors |= gemm(module, codes, zeros, scales)
        else:
            tensors |= gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, None, module)
    extra = {
        "lm_head": {"bits": 4, "group_size": 64},
        r".*\.layers\.1\..*": {"group_size": 128},
        "model.layers.2.mlp.up_proj": {"bits": 16, "data_type": "float"},
    }
    folder = write(tmp_path, tensors, config(packing, extra_config=extra))
    for module, weight in expected.items():
        assert torch.equal(read(folder, module), weight)
    left_out = open_checkpoint(folder).linear("model.layers.2.mlp.up_proj")
    assert isinstance(left_out, Tensor)
    assert torch.equal(left_out, plain)


def test_the_configuration_may_be_in_autoround_s_own_file(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(128, 64, 4, zeros=(0, 16))
    folder = write(tmp_path, gptq_tensors(codes, pack(zeros, 1), scales, None))
    (folder / "quantization_config.json").write_text(json.dumps(config("auto_round")))
    assert torch.equal(read(folder), exact_weight(codes, zeros, scales, torch.arange(128) // 32))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"act_bits": 8}, "says act_bits 8, activations of 16 bits are supported"),
        ({"data_type": "mx_fp"}, "says data_type 'mx_fp', 'int' is supported"),
        ({"packing_format": "auto_round:fp8"}, "says packing 'auto_round:fp8', auto_round, auto_round:auto_gptq,"),
    ],
)
def test_what_is_not_integer_weights_only_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    codes, zeros, scales = random_integers(128, 64, 4)
    folder = write(tmp_path, gptq_tensors(codes, pack(zeros, 1), scales, None), config("auto_round", **changed))
    with pytest.raises(UnsupportedModelError) as raised:
        open_checkpoint(folder)
    assert said in raised.value.message
    assert "config.json quantization_config" in raised.value.message


def test_a_packing_against_the_tensors_is_refused(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(128, 64, 4)
    folder = write(tmp_path / "a", gptq_tensors(codes, pack(zeros, 1), scales, None), config("auto_round:auto_awq"))
    with pytest.raises(CheckpointError, match=r"says quant_method auto-round in words of awq, but .* layout of gptq"):
        open_checkpoint(folder)
    folder = write(tmp_path / "b", gemm(MODULE, codes, zeros, scales), config("auto_round"))
    with pytest.raises(CheckpointError, match=r"says quant_method auto-round in words of gptq, but .* of awq gemm"):
        open_checkpoint(folder)
