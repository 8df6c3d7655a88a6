"""GPTQ at every width of codes and words, in every group, and zero points whose words tell their version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import Checkpoint, open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.writers import (
    MODULE,
    exact_weight,
    gptq_config,
    gptq_tensors,
    gptqmodel_zero_words,
    pack,
    random_integers,
    write_folder,
)

WIDTHS = (2, 3, 4, 8)
K, N, GROUP = 128, 64, 32
NATURAL = torch.arange(K) // GROUP


def dense(checkpoint: Checkpoint, module: str = MODULE) -> Tensor:
    weight = checkpoint.linear(module)
    assert isinstance(weight, QuantizedWeight)
    return weight.dequantize().double()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("version", [1, 2])
def test_codes_and_zero_points_of_any_width_in_words_of_any_width_are_exact(
    tmp_path: Path, bits: int, width: int, version: int
) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP, zeros=(0, 1 << bits), bits=bits)
    words = gptqmodel_zero_words(zeros, bits, width) if version == 1 else pack(zeros, 1, bits, width)
    quantization = gptq_config(
        GROUP,
        bits=bits,
        pack_dtype=f"int{width}",
        checkpoint_format="gptq" if version == 1 else "gptq_v2",
        meta={"quantizer": ["gptqmodel:7.0.0"]},
    )
    folder = write_folder(tmp_path, gptq_tensors(codes, words, scales, NATURAL, bits=bits), quantization)
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert (checkpoint.report.bits, checkpoint.report.warnings) == (bits, ())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("rows", "group_size"), [(96, 16), (100, 32), (160, 64), (160, 256), (1100, 512), (1152, 1024), (160, -1)]
)
def test_groups_from_16_to_1024_and_all_of_k_are_exact_whether_or_not_they_divide_k(
    tmp_path: Path, bits: int, act_order: bool, rows: int, group_size: int
) -> None:
    order = torch.arange(rows) // (rows if group_size == -1 else group_size)
    if act_order:
        order = order[torch.randperm(rows, generator=torch.Generator().manual_seed(rows))]
    codes, zeros, scales = random_integers(rows, N, int(order.max()) + 1, bits=bits)
    tensors = gptq_tensors(codes, gptqmodel_zero_words(zeros, bits), scales, order, bits=bits)
    folder = write_folder(tmp_path, tensors, gptq_config(group_size, bits=bits, desc_act=act_order))
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, order))
    one_group = group_size == -1 or group_size >= rows
    assert checkpoint.report.group_size == (-1 if one_group else group_size)
    assert checkpoint.report.act_order is (act_order and not one_group)


@pytest.mark.parametrize("bits", WIDTHS)
def test_bits_group_and_columns_that_fill_no_word_are_read_off_the_tensors_without_a_configuration(
    tmp_path: Path, bits: int
) -> None:
    columns = 50
    codes, zeros, scales = random_integers(K, columns, K // GROUP, bits=bits)
    tensors = gptq_tensors(codes, gptqmodel_zero_words(zeros, bits), scales, NATURAL, bits=bits)
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors))
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert checkpoint.report.describe() == f"GPTQ {bits}-bit, group {GROUP}, asymmetric"


def test_3_bit_codes_may_fill_whole_cycles_of_three_words(tmp_path: Path) -> None:
    rows = 100
    order = torch.arange(rows) // GROUP
    codes, zeros, scales = random_integers(rows, N, 4, bits=3)
    tensors = gptq_tensors(codes, gptqmodel_zero_words(zeros, 3), scales, order, bits=3)
    words = tensors[f"{MODULE}.qweight"]
    assert words.shape[0] == 10
    tensors[f"{MODULE}.qweight"] = torch.cat([words, torch.zeros(2, N, dtype=torch.int32)])
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, gptq_config(GROUP, bits=3)))
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, order))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("declared", "stored"), [("gptq", 2), ("gptq_v2", 1), ("gptq", 1), ("gptq_v2", 2)])
@pytest.mark.parametrize("columns", [64, 50])
def test_the_words_of_a_symmetric_file_decide_its_version_whatever_is_declared(
    tmp_path: Path, bits: int, declared: str, stored: int, columns: int
) -> None:
    codes, _, scales = random_integers(K, columns, K // GROUP, bits=bits)
    zeros = torch.full((K // GROUP, columns), 1 << (bits - 1))
    words = pack(zeros, 1, bits) if stored == 2 else gptqmodel_zero_words(zeros, bits)
    folder = write_folder(
        tmp_path,
        gptq_tensors(codes, words, scales, None, bits=bits),
        gptq_config(GROUP, bits=bits, format=declared, sym=True),
    )
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert checkpoint.report.symmetric
    assert checkpoint.report.variant == f"v{stored}"
    agrees = (declared == "gptq_v2") == (stored == 2)
    assert [f"read as version {stored}" in warning for warning in checkpoint.report.warnings] == [True] * (not agrees)


def zero_points_of_a_model(groups: int, bits: int) -> Tensor:
    """Around the middle code, as those of real weights are."""
    middle = (1 << bits) // 2
    drawn = torch.randint(-1, 1, (groups, N), generator=torch.Generator().manual_seed(bits))
    return middle + drawn


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("declared", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("stored", [1, 2])
def test_the_average_zero_point_of_an_asymmetric_file_decides_its_version_whatever_is_declared(
    tmp_path: Path, bits: int, declared: str | None, stored: int
) -> None:
    rows, group_size = 512, 16
    order = torch.arange(rows) // group_size
    codes, _, scales = random_integers(rows, N, rows // group_size, bits=bits)
    zeros = zero_points_of_a_model(rows // group_size, bits)
    words = pack(zeros, 1, bits) if stored == 2 else gptqmodel_zero_words(zeros, bits)
    quantization = gptq_config(group_size, bits=bits) | ({} if declared is None else {"checkpoint_format": declared})
    checkpoint = open_checkpoint(
        write_folder(tmp_path, gptq_tensors(codes, words, scales, order, bits=bits), quantization)
    )
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, order))
    assert not checkpoint.report.symmetric
    agrees = (declared == "gptq_v2") == (stored == 2)
    assert [f"read as version {stored}" in warning for warning in checkpoint.report.warnings] == [True] * (not agrees)


@pytest.mark.parametrize("declared", ["gptq", "gptq_v2"])
def test_where_few_asymmetric_zero_points_tell_nothing_the_declared_version_is_taken(
    tmp_path: Path, declared: str
) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    words = pack(zeros, 1) if declared == "gptq_v2" else gptqmodel_zero_words(zeros)
    folder = write_folder(
        tmp_path, gptq_tensors(codes, words, scales, NATURAL), gptq_config(GROUP, checkpoint_format=declared)
    )
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert checkpoint.report.warnings == ()


def symmetric_module(name: str, version: int) -> dict[str, Tensor]:
    codes, _, scales = random_integers(K, N, K // GROUP)
    zeros = torch.full((K // GROUP, N), 8)
    words = pack(zeros, 1) if version == 2 else gptqmodel_zero_words(zeros)
    return gptq_tensors(codes, words, scales, NATURAL, name)


def test_symmetric_modules_tell_the_version_of_asymmetric_ones(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    tensors = symmetric_module("a", 2) | gptq_tensors(codes, pack(zeros, 1), scales, NATURAL)
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, gptq_config(GROUP)))
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert "every field of a.qzeros" in checkpoint.report.warnings[0]


def test_symmetric_modules_of_two_versions_are_a_contradiction_that_names_both(tmp_path: Path) -> None:
    tensors = symmetric_module("a", 1) | symmetric_module("b", 2)
    with pytest.raises(CheckpointError, match=r"a\.qzeros holds .* of version 1, b\.qzeros those of version 2"):
        open_checkpoint(write_folder(tmp_path, tensors, gptq_config(GROUP)))


def test_asymmetric_zero_points_in_a_file_declared_symmetric_are_reported_and_used(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    folder = write_folder(
        tmp_path, gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, NATURAL), gptq_config(GROUP, sym=True)
    )
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert f"says sym true, but the zero points of 1 modules differ (the first in {MODULE}" in str(
        checkpoint.report.warnings
    )


def test_words_of_another_width_than_declared_or_of_two_widths_are_refused(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    tensors = gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, NATURAL)
    folder = write_folder(tmp_path / "a", tensors, gptq_config(GROUP, pack_dtype="int16"))
    with pytest.raises(CheckpointError, match=r"says pack_dtype int16, but .*qweight has words of int32"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="pack_dtype is 'int4', one of int8, int16, int32, int64 was expected"):
        open_checkpoint(write_folder(tmp_path / "b", tensors, gptq_config(GROUP, pack_dtype="int4")))
    tensors[f"{MODULE}.qzeros"] = pack(zeros, 1, 4, 16)
    with pytest.raises(UnsupportedModelError, match=r"qweight of torch\.int32 and qzeros of torch\.int16"):
        open_checkpoint(write_folder(tmp_path / "c", tensors, gptq_config(GROUP)))


@pytest.mark.parametrize("where", [{"static_groups": True}, {"meta": {"static_groups": True}}])
def test_act_order_with_static_groups_needs_no_g_idx(tmp_path: Path, where: dict[str, object]) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    folder = write_folder(
        tmp_path,
        gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, None),
        gptq_config(GROUP, desc_act=True, **where),
    )
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert not checkpoint.report.act_order
