"""GPTQ beyond what auto-gptq writes: both zero-point versions, g_idx as found, odd sizes, contradictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import Checkpoint, open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.writers import (
    MODULE,
    autogptq_zero_words,
    exact_weight,
    gptq_config,
    gptq_tensors,
    gptqmodel_zero_words,
    pack,
    random_integers,
    write_folder,
)

K, N, GROUP = 128, 64, 32
NATURAL = torch.arange(K) // GROUP


def dense(checkpoint: Checkpoint) -> Tensor:
    weight = checkpoint.linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    return weight.dequantize().double()


def test_version_1_of_gptqmodel_and_version_2_give_the_same_exact_weight_with_zero_points_of_zero(
    tmp_path: Path,
) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP, zeros=(0, 16))
    assert bool((zeros == 0).any())
    exact = exact_weight(codes, zeros, scales, NATURAL)
    v1 = write_folder(
        tmp_path / "v1",
        gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, NATURAL),
        gptq_config(GROUP, meta={"quantizer": ["gptqmodel:0.9.0"]}),
    )
    v2 = write_folder(
        tmp_path / "v2", gptq_tensors(codes, pack(zeros, 1), scales, NATURAL), gptq_config(GROUP, format="gptq_v2")
    )
    for folder in (v1, v2):
        checkpoint = open_checkpoint(folder)
        assert torch.equal(dense(checkpoint), exact)
        assert checkpoint.report.warnings == ()


def test_version_1_of_autogptq_with_a_zero_point_of_zero_is_reported(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    zeros[1, 10] = 0
    folder = write_folder(
        tmp_path, gptq_tensors(codes, autogptq_zero_words(zeros), scales, NATURAL), gptq_config(GROUP)
    )
    checkpoint = open_checkpoint(folder)
    assert checkpoint.report.warnings[0].startswith("1 words of zero points")
    weight = checkpoint.linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    assert weight.zeros is not None
    intact = torch.ones(zeros.shape, dtype=torch.bool)
    intact[1, 11:16] = False  # the higher nibbles of the same word
    assert torch.equal(weight.zeros[intact], zeros[intact].int())


@pytest.mark.parametrize(("declared", "stored"), [("gptq", 2), ("gptq_v2", 1)])
def test_the_words_of_a_symmetric_file_overrule_a_wrong_version(tmp_path: Path, declared: str, stored: int) -> None:
    codes, _, scales = random_integers(K, N, K // GROUP)
    zeros = torch.full((K // GROUP, N), 8)
    words = pack(zeros, 1) if stored == 2 else autogptq_zero_words(zeros)
    folder = write_folder(tmp_path, gptq_tensors(codes, words, scales, None), gptq_config(GROUP, format=declared))
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert checkpoint.report.variant == f"v{stored}"
    assert f"read as version {stored}" in checkpoint.report.warnings[0]


@pytest.mark.parametrize("declared", [True, False])
def test_a_permuted_g_idx_is_followed_whatever_the_flag_says(tmp_path: Path, declared: bool) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    order = NATURAL[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    folder = write_folder(
        tmp_path,
        gptq_tensors(codes, autogptq_zero_words(zeros), scales, order),
        gptq_config(GROUP, desc_act=declared),
    )
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, order))
    assert checkpoint.report.act_order
    assert bool(checkpoint.report.warnings) is not declared
    weight = checkpoint.linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    assert weight.perm is not None
    assert torch.equal(order[weight.perm], NATURAL)


@pytest.mark.parametrize("order", [None, torch.zeros(K), NATURAL], ids=["absent", "all zero", "natural"])
def test_g_idx_may_be_absent_zero_or_natural(tmp_path: Path, order: Tensor | None) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    folder = write_folder(tmp_path, gptq_tensors(codes, autogptq_zero_words(zeros), scales, order), gptq_config(GROUP))
    checkpoint = open_checkpoint(folder)
    assert torch.equal(dense(checkpoint), exact_weight(codes, zeros, scales, NATURAL))
    assert not checkpoint.report.act_order


@pytest.mark.parametrize(("rows", "group_size"), [(160, 128), (160, 64), (96, 128), (128, -1), (100, 32)])
@pytest.mark.parametrize("declared", [True, False])
def test_inputs_need_not_be_a_multiple_of_the_group(tmp_path: Path, rows: int, group_size: int, declared: bool) -> None:
    size = rows if group_size == -1 else group_size
    order = torch.arange(rows) // size
    codes, zeros, scales = random_integers(rows, N, -(-rows // size))
    folder = write_folder(
        tmp_path,
        gptq_tensors(codes, autogptq_zero_words(zeros), scales, order),
        gptq_config(group_size) if declared else None,
    )
    weight = open_checkpoint(folder).linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize().double(), exact_weight(codes, zeros, scales, order))
    assert weight.group_size == min(size, rows)


def test_modules_without_packed_tensors_stay_plain(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    plain = torch.randn(N, K).half()
    tensors = gptq_tensors(codes, autogptq_zero_words(zeros), scales, NATURAL)
    tensors |= {"model.layers.1.mlp.up_proj.weight": plain, f"{MODULE}.bias": torch.ones(N).half()}
    folder = write_folder(tmp_path, tensors, gptq_config(GROUP, dynamic={r"-:.*\.1\..*": {}}))
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint.linear(MODULE), QuantizedWeight)
    weight = checkpoint.linear("model.layers.1.mlp.up_proj")
    assert isinstance(weight, Tensor)
    assert torch.equal(weight, plain)
    assert checkpoint.names() == [f"{MODULE}.bias", f"{MODULE}.weight", "model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(checkpoint.tensor(f"{MODULE}.bias"), torch.ones(N).half())


def test_a_module_may_have_a_group_size_of_its_own(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(K, N, 2)
    folder = write_folder(
        tmp_path,
        gptq_tensors(codes, autogptq_zero_words(zeros), scales, None),
        gptq_config(GROUP, dynamic={r".*up_proj": {"group_size": 64}}),
    )
    assert torch.equal(dense(open_checkpoint(folder)), exact_weight(codes, zeros, scales, torch.arange(K) // 64))


@pytest.mark.parametrize(
    ("quantization", "change", "said"),
    [
        (gptq_config(64), {}, "group_size 64, which makes 2 groups of the 128 inputs of model.layers.0.mlp.up_proj"),
        (gptq_config(GROUP, bits=8), {}, "says 8 bits for model.layers.0.mlp.up_proj, but the shapes of its qweight"),
        (gptq_config(GROUP, desc_act=True), {"g_idx": None}, "desc_act true, but model.layers.0.mlp.up_proj.g_idx"),
        (
            gptq_config(GROUP, quant_method="awq"),
            {},
            "quant_method awq, but model.layers.0.mlp.up_proj.qweight has the",
        ),
        (gptq_config(0), {}, "group_size is 0"),
        (gptq_config(-5), {}, "group_size is -5"),
        (gptq_config(GROUP, bits="4"), {}, "bits is '4'"),
        (gptq_config(GROUP, desc_act="no"), {}, "desc_act is 'no'"),
        (gptq_config(GROUP, format=3), {}, "format is 3"),
        (gptq_config(GROUP), {"g_idx": NATURAL + 1}, "g_idx names groups 1 to 4"),
        (gptq_config(GROUP), {"g_idx": (NATURAL - 1).clamp(min=0)}, "g_idx names groups 0 to 2"),
        (
            gptq_config(GROUP),
            {"g_idx": NATURAL[:-8]},
            "do not belong together, GPTQ needs",
        ),
        (gptq_config(GROUP), {"qzeros": None}, "model.layers.0.mlp.up_proj.qzeros is not in the checkpoint"),
        (gptq_config(GROUP), {"scales": None}, "model.layers.0.mlp.up_proj.scales is not in the checkpoint"),
        (gptq_config(GROUP), {"g_idx": torch.tensor(0)}, "g_idx []) do not belong together"),
        (gptq_config(GROUP), {"qzeros": torch.ones(3, N // 8)}, "qzeros [3, 8], scales [4, 64]"),
        (gptq_config(GROUP), {"scales": torch.ones(4, N + 8).half()}, "do not belong together"),
    ],
)
def test_contradictions_name_both_values(
    tmp_path: Path, quantization: dict[str, Any], change: dict[str, Tensor | None], said: str
) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    tensors = gptq_tensors(codes, autogptq_zero_words(zeros), scales, NATURAL)
    for part, value in change.items():
        del tensors[f"{MODULE}.{part}"]
        if value is not None:
            tensors[f"{MODULE}.{part}"] = value if part == "scales" else value.to(torch.int32)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(write_folder(tmp_path, tensors, quantization))
    assert said in raised.value.message


@pytest.mark.parametrize(
    ("bits", "layout", "said"),
    [
        (5, None, "is 5-bit GPTQ, 2, 3, 4, 8 bits are supported"),
        (7, "gptq_p", "is 7-bit GPTQ, 2, 3, 4, 8 bits are supported"),
        (3, "gptq_p", r"is 3-bit GPTQ in planes \(gptq_p\), 2, 3, 4, 8 bits in gptq and gptq_v2"),
    ],
)
def test_other_bits_are_refused_by_name(tmp_path: Path, bits: int, layout: str | None, said: str) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP, bits=bits)
    tensors = gptq_tensors(codes, pack(zeros, 1, bits), scales, NATURAL, bits=bits)
    quantization = gptq_config(GROUP, bits=bits) | ({} if layout is None else {"format": layout})
    with pytest.raises(UnsupportedModelError, match=said):
        open_checkpoint(write_folder(tmp_path, tensors, quantization))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    codes, zeros, scales = random_integers(K, N, K // GROUP)
    scales[2, 3] = value
    folder = write_folder(
        tmp_path, gptq_tensors(codes, autogptq_zero_words(zeros), scales, NATURAL), gptq_config(GROUP)
    )
    with pytest.raises(CheckpointError, match=r"up_proj\.scales holds NaN or infinite"):
        open_checkpoint(folder).linear(MODULE)
