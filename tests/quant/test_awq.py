"""AWQ in each layout beyond what autoawq writes: zero points of 0 or none, odd sizes, contradictions, damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.formats.awq import find_awq_layout
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight
from tests.quant.awq_writers import WRITERS, awq_config, exact, gemm, gemv, gemv_fast, llm_awq
from tests.quant.writers import MODULE, random_integers, write_folder

VERSIONS = {name: {"version": name} for name in WRITERS} | {"llm-awq": {"version": "gemv", "backend": "llm-awq"}}
# K and group size: one group, groups to be padded to 8, 16 and 32, and more groups than that.
SIZES = [(128, -1), (256, 128), (192, 64), (256, 32), (128, 32), (1280, 32)]


def integers(rows: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, zeros, scales = random_integers(rows, 64, rows // abs(group_size) if group_size > 0 else 1, zeros=(0, 16))
    zeros[0, :8] = 0
    return codes, zeros, scales


def read(folder: Path) -> QuantizedWeight:
    weight = open_checkpoint(folder).linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    return weight


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder).linear(MODULE)
    return raised.value.message


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize(("rows", "group_size"), SIZES)
@pytest.mark.parametrize("declared", [True, False])
def test_a_weight_is_scale_times_code_minus_zero_in_every_layout(
    tmp_path: Path, layout: str, rows: int, group_size: int, declared: bool
) -> None:
    codes, zeros, scales = integers(rows, group_size)
    config = awq_config(group_size, **VERSIONS[layout]) if declared else None
    folder = write_folder(tmp_path, WRITERS[layout](MODULE, codes, zeros, scales), config)
    report = open_checkpoint(folder).report
    assert (report.format, report.variant, report.group_size) == ("awq", layout, group_size)
    assert report.symmetric is False
    assert report.warnings == ()
    weight = read(folder)
    assert torch.equal(weight.codes, codes.to(torch.uint8))
    assert torch.equal(weight.dequantize(), exact(layout, codes, zeros, scales))
    if layout in ("gemm", "gemv"):
        assert weight.zeros is not None
        assert torch.equal(weight.zeros, zeros.int())


@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize("config", [awq_config(64, zero_point=False), None])
def test_without_zero_points_all_are_8(tmp_path: Path, layout: str, config: dict[str, object] | None) -> None:
    codes, _, scales = integers(128, 64)
    folder = write_folder(tmp_path, WRITERS[layout](MODULE, codes, None, scales), config)
    assert open_checkpoint(folder).report.symmetric
    assert torch.equal(read(folder).dequantize(), exact(layout, codes, torch.full_like(scales, 8).long(), scales))


@pytest.mark.parametrize("layout", WRITERS)
def test_zero_points_of_8_are_symmetric_whatever_is_declared(tmp_path: Path, layout: str) -> None:
    """AutoRound stores them although it declares zero_point false."""
    codes, _, scales = integers(128, 64)
    zeros = torch.full(scales.shape, 8)
    for declared in (True, False):
        config = awq_config(64, zero_point=declared)
        folder = write_folder(tmp_path / str(declared), WRITERS[layout](MODULE, codes, zeros, scales), config)
        assert open_checkpoint(folder).report.symmetric
        assert torch.equal(read(folder).dequantize(), exact(layout, codes, zeros, scales))


@pytest.mark.parametrize("layout", WRITERS)
def test_zero_points_are_used_although_declared_absent(tmp_path: Path, layout: str) -> None:
    codes, zeros, scales = integers(128, 64)
    folder = write_folder(
        tmp_path, WRITERS[layout](MODULE, codes, zeros, scales), awq_config(64, zero_point=False, version=layout)
    )
    assert torch.equal(read(folder).dequantize(), exact(layout, codes, zeros, scales))


@pytest.mark.parametrize("layout", WRITERS)
def test_lost_zero_points_are_not_read_as_8(tmp_path: Path, layout: str) -> None:
    codes, zeros, scales = integers(128, 64)
    name = f"{MODULE}.scaled_zeros" if layout == "llm-awq" else f"{MODULE}.qzeros"
    whole = WRITERS[layout](MODULE, codes, zeros, scales)
    lost = {key: tensor for key, tensor in whole.items() if key != name}
    message = refused(write_folder(tmp_path / "all", lost, awq_config(64)))
    assert "qzeros is missing, it was expected because config.json quantization_config says that zero" in message
    others = WRITERS[layout]("a", *integers(192, 64))
    message = refused(write_folder(tmp_path / "some", others | lost))
    if layout == "llm-awq":
        assert f"a has the layout of awq llm-awq, {MODULE} that of awq gemv_fast" in message
    else:
        assert f"{name} is missing, it was expected because a.qzeros is there" in message


@pytest.mark.parametrize(
    ("writer", "version", "warns"),
    [
        (gemm, {"version": "GEMM"}, False),
        (gemm, {"version": "exllama"}, False),
        (gemm, {"version": "gemv"}, True),
        (gemm, {"version": "marlin"}, True),
        (gemm, {"version": "gemm", "backend": "llm-awq"}, True),
        (gemm, {"version": "gemm", "backend": "autoawq"}, False),
        (gemv, {"version": "gemm"}, True),
        (gemv_fast, {"version": "gemv"}, True),
        (gemv_fast, {"version": "gemv", "backend": "llm-awq"}, False),
        (llm_awq, {"version": "GEMV_FAST"}, False),
    ],
)
def test_the_tensors_are_followed_and_another_declared_version_is_a_warning(
    tmp_path: Path, writer: Callable[..., dict[str, Tensor]], version: dict[str, str], warns: bool
) -> None:
    codes, zeros, scales = integers(256, 64)
    folder = write_folder(tmp_path, writer(MODULE, codes, zeros, scales), awq_config(64, **version))
    assert torch.equal(read(folder).codes, codes.to(torch.uint8))
    report = open_checkpoint(folder).report
    assert bool(report.warnings) == warns
    if warns:
        assert "says AWQ version" in report.warnings[0]
        assert f"have the layout of {report.variant}: they are followed" in report.warnings[0]


def test_modules_left_out_and_biases_are_plain(tmp_path: Path) -> None:
    codes, zeros, scales = integers(128, 64)
    gate = torch.randn(64, 128).half()
    tensors = gemv(MODULE, codes, zeros, scales)
    tensors |= {f"{MODULE}.bias": torch.ones(64), "model.layers.0.mlp.gate.weight": gate}
    # AutoAWQ looks for the names anywhere in a module's: "up" would leave the packed module out.
    config = awq_config(64, version="gemv", modules_to_not_convert=["gate", "up"])
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, config))
    assert checkpoint.names() == ["model.layers.0.mlp.gate.weight", f"{MODULE}.bias", f"{MODULE}.weight"]
    left_out = checkpoint.linear("model.layers.0.mlp.gate")
    assert isinstance(left_out, Tensor)
    assert torch.equal(left_out, gate)
    assert isinstance(checkpoint.linear(MODULE), QuantizedWeight)


def test_llm_awq_may_be_in_bfloat16(tmp_path: Path) -> None:
    codes, zeros, scales = integers(256, 64)
    scales = scales.bfloat16()
    folder = write_folder(tmp_path, llm_awq(MODULE, codes, zeros, scales), awq_config(64, **VERSIONS["llm-awq"]))
    assert torch.equal(read(folder).dequantize(), exact("llm-awq", codes, zeros, scales))


def test_a_square_gemv_fast_module_is_not_taken_for_gptq(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(64, 64, 2)
    folder = write_folder(tmp_path, gemv_fast(MODULE, codes, zeros, scales))
    assert torch.equal(read(folder).dequantize(), exact("gemv_fast", codes, zeros, scales))


def test_32_inputs_in_one_group_of_gemv_are_not_taken_for_gemm(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(32, 64, 1)
    folder = write_folder(tmp_path, gemv(MODULE, codes, zeros, scales))
    assert torch.equal(read(folder).dequantize(), exact("gemv", codes, zeros, scales))


@pytest.mark.parametrize(
    ("dtype", "words", "zeros", "scales"),
    [
        (torch.int16, (16, 64), (1, 16), (1, 64)),  # GPTQModel's pack_dtype int16: 4 codes a word, the zero points too
        (torch.int32, (64, 64), (64, 4), (64, 64)),  # 2 bits, 16 inputs a group
    ],
)
def test_gptq_of_any_word_is_not_taken_for_gemv(
    tmp_path: Path, dtype: torch.dtype, words: tuple[int, int], zeros: tuple[int, int], scales: tuple[int, int]
) -> None:
    tensors = {
        f"{MODULE}.qweight": torch.zeros(words, dtype=dtype),
        f"{MODULE}.qzeros": torch.zeros(zeros, dtype=dtype),
        f"{MODULE}.scales": torch.ones(scales).half(),
    }
    folder = write_folder(tmp_path, tensors)
    assert find_awq_layout(TensorFiles([folder / "model.safetensors"]), MODULE) is None


def test_the_marlin_layout_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tensors = {
        f"{MODULE}.qweight": torch.zeros(8, 128, dtype=torch.int32),
        f"{MODULE}.scales": torch.ones(1, 64).half(),
    }
    config = awq_config(128, zero_point=False, version="marlin")
    with pytest.raises(UnsupportedModelError, match=r"AWQ's marlin layout.*save the model again with version gemm"):
        open_checkpoint(write_folder(tmp_path, tensors, config))


def cut(tensor: Tensor) -> Tensor:
    return tensor[:, :-1]


def shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def half(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2]


def flat(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def int64(tensor: Tensor) -> Tensor:
    return tensor.long()


def floats(tensor: Tensor) -> Tensor:
    return tensor.half()


def nothing(tensor: Tensor) -> Tensor:
    return tensor * 0


def infinite(tensor: Tensor) -> Tensor:
    return torch.where(torch.arange(tensor.numel()).view(tensor.shape) == 0, torch.inf, tensor)


@pytest.mark.parametrize(
    ("layout", "name", "damage", "said"),
    [
        ("gemm", "qweight", shorter, "is for 255 inputs, a multiple of the group size 64"),
        ("gemm", "qweight", half, "group_size 64, which makes 2 groups of the 128 inputs"),
        ("gemm", "qweight", cut, "which fit neither GPTQ"),
        ("gemm", "qweight", flat, "matrices were expected"),
        ("gemm", "qweight", int64, "is torch.int64 [256, 12], torch.int32 [256, 12] was expected"),
        ("gemm", "qzeros", shorter, "is torch.int32 [3, 12], torch.int32 [4, 12] was expected"),
        ("gemm", "qzeros", floats, "is torch.float16 [4, 12], torch.int32 [4, 12] was expected"),
        ("gemm", "scales", shorter, "is torch.int32 [4, 12], torch.int32 [3, 12] was expected"),
        ("gemm", "scales", cut, "which fit neither GPTQ"),
        ("gemm", "scales", int64, "is torch.int64 [4, 96], floats [4, 96] was expected"),
        ("gemm", "scales", infinite, "holds NaN or infinite"),
        ("gemv", "qweight", shorter, "which fit neither GPTQ"),
        ("gemv", "qweight", cut, "is for 248 inputs, a multiple of the group size 64"),
        ("gemv", "qweight", int64, "is torch.int64 [96, 32], torch.int32 [96, 32] was expected"),
        ("gemv", "qzeros", cut, "is torch.int32 [96, 1], torch.int32 [96, 2] was expected"),
        ("gemv", "qzeros", flat, "is torch.int32 [192], torch.int32 [96, 2] was expected"),
        ("gemv", "scales", shorter, "which fit neither GPTQ"),
        ("gemv", "scales", nothing, "no rows, one per group was expected"),
        ("gemv", "scales", int64, "is torch.int64 [96, 16], floats [96, 16] was expected"),
        ("gemv", "scales", infinite, "holds NaN or infinite"),
        ("gemv_fast", "qweight", shorter, "which fit neither GPTQ"),
        ("gemv_fast", "qweight", cut, "has 255 columns, a multiple of 64 was expected"),
        ("gemv_fast", "qweight", int64, "which fit neither GPTQ"),
        ("gemv_fast", "qzeros", cut, "is torch.float16 [16, 95], floats [16, 96] was expected"),
        ("gemv_fast", "qzeros", int64, "which fit neither GPTQ"),
        ("gemv_fast", "qzeros", infinite, "holds NaN or infinite"),
        ("gemv_fast", "scales", cut, "which fit neither GPTQ"),
        ("gemv_fast", "scales", int64, "is torch.int64 [16, 96], floats [16, 96] was expected"),
        ("llm-awq", "scaled_zeros", shorter, "is torch.float16 [15, 96], floats [16, 96] was expected"),
    ],
)
def test_damage_is_one_sentence_that_names_what_was_found_and_expected(
    tmp_path: Path, layout: str, name: str, damage: Callable[[Tensor], Tensor], said: str
) -> None:
    codes, zeros, scales = random_integers(256, 96, 4)
    tensors = WRITERS[layout](MODULE, codes, zeros, scales)
    tensors[f"{MODULE}.{name}"] = damage(tensors[f"{MODULE}.{name}"])
    message = refused(write_folder(tmp_path, tensors, awq_config(64, **VERSIONS[layout])))
    assert said in message
    assert MODULE in message
    assert ". " not in message


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("declared", [True, False])
def test_any_damage_ends_in_an_error_of_ours_or_a_model(tmp_path: Path, layout: str, declared: bool) -> None:
    tensors = WRITERS[layout](MODULE, *random_integers(256, 96, 4))
    config = awq_config(64, **VERSIONS[layout]) if declared else None
    damages: list[Callable[[Tensor], Tensor]] = [cut, shorter, half, flat, int64, floats, nothing, infinite, torch.t]
    damages += [lambda tensor: tensor[:0], lambda tensor: tensor[:, :0], lambda tensor: tensor[0, 0]]
    refusals = 0
    for name, tensor in tensors.items():
        for damage in damages:
            folder = write_folder(tmp_path, tensors | {name: damage(tensor)}, config)
            try:
                read(folder).dequantize()
            except CheckpointError:
                refusals += 1
    assert refusals > 20


@pytest.mark.parametrize("layout", WRITERS)
def test_a_lost_tensor_is_named(tmp_path: Path, layout: str) -> None:
    tensors = WRITERS[layout](MODULE, *integers(128, 64))
    del tensors[f"{MODULE}.scales"]
    assert f"tensor {MODULE}.scales is not in the checkpoint" in refused(write_folder(tmp_path, tensors))


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bits": 8}, "says 8 bits, but"),
        ({"group_size": 32}, "group_size 32, which makes 8 groups of the 256 inputs of"),
        ({"group_size": 128}, "group_size 128, which makes 2 groups of the 256 inputs of"),
        ({"quant_method": "gptq"}, "says quant_method gptq, but"),
        ({"zero_point": "yes"}, "zero_point is 'yes', true or false was expected"),
    ],
)
def test_a_contradiction_names_both_sides(tmp_path: Path, layout: str, changed: dict[str, Any], said: str) -> None:
    tensors = WRITERS[layout](MODULE, *integers(256, 64))
    assert said in refused(write_folder(tmp_path, tensors, awq_config(64, **VERSIONS[layout]) | changed))
