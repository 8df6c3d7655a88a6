"""Files of the real packers (fixtures/write_fixtures.py) read by ours: every weight exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.writers import MODULE

FIXTURES = Path(__file__).parent / "fixtures"
# Case -> what describe() says and the group of the rows' natural order.
CASES = {
    "gptq_symmetric": "GPTQ 4-bit, group 32, symmetric",
    "gptq_asymmetric": "GPTQ 4-bit, group 32, asymmetric",
    "gptq_act_order": "GPTQ 4-bit, group 32, symmetric, act-order",
    "gptq_short_last_group": "GPTQ 4-bit, group 128, symmetric",
    "gptq_act_order_short_last_group": "GPTQ 4-bit, group 64, symmetric, act-order",
    "gptq_one_group": "GPTQ 4-bit, one group per column, symmetric",
    "awq_gemm": "AWQ 4-bit, group 32, asymmetric",
    "awq_gemm_zero_points_of_zero": "AWQ 4-bit, group 64, asymmetric",
}


def read(case: str) -> tuple[QuantizedWeight, dict[str, Tensor], Tensor]:
    """Our weight, what the packer was given, and the stored scales of every element [K, N]."""
    with_prefix = load_file(FIXTURES / "expected.safetensors")
    expected = {key.removeprefix(f"{case}."): t for key, t in with_prefix.items() if key.startswith(f"{case}.")}
    stored = load_file(FIXTURES / case / "model.safetensors")
    weight = open_checkpoint(FIXTURES / case).linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    order = stored.get(f"{MODULE}.g_idx", torch.arange(weight.K) // weight.group_size)
    scales = stored[f"{MODULE}.scales"][order]
    expected["zeros_of_rows"] = expected["zeros"][order].int()
    return weight, expected, scales


@pytest.mark.parametrize("case", CASES)
def test_the_format_is_found(case: str) -> None:
    report = open_checkpoint(FIXTURES / case).report
    assert report.describe() == CASES[case]
    assert report.warnings == ()
    assert report.evidence


@pytest.mark.parametrize("case", CASES)
def test_the_weight_is_the_packers_integers_times_its_scales_exactly(case: str) -> None:
    weight, expected, scales = read(case)
    exact = scales.double() * (expected["codes"].int() - expected["zeros_of_rows"]).double()
    assert torch.equal(weight.dequantize().double(), exact.t())


@pytest.mark.parametrize("case", CASES)
def test_the_weight_in_fp16_is_what_the_packers_own_code_computes(case: str) -> None:
    # Both round the same exact product once: theirs in fp16 arithmetic, ours when leaving float32.
    weight, expected, _ = read(case)
    assert torch.equal(weight.dequantize(torch.float16), expected["dequantized"].t())


def test_zero_points_that_autogptq_destroyed_are_reported_and_all_others_exact() -> None:
    case = "gptq_zero_points_of_zero"
    report = open_checkpoint(FIXTURES / case).report
    assert "AutoGPTQ" in report.warnings[0]
    assert f"{MODULE}.qzeros" in report.warnings[0]
    weight, expected, scales = read(case)
    exact = (scales.double() * (expected["codes"].int() - expected["zeros_of_rows"]).double()).t()
    # In a word of eight columns, those after the first zero point of 0 are lost.
    zeros = expected["zeros"].view(-1, 8, 8)
    intact = (torch.cumsum(zeros == 0, 2) - (zeros == 0).int() == 0).view(expected["zeros"].shape)
    order = torch.arange(weight.K) // weight.group_size
    of_rows = intact[order].t()
    assert not bool(of_rows.all())
    assert torch.equal(weight.dequantize().double()[of_rows], exact[of_rows])
