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
    "gptq_2bit_symmetric": "GPTQ 2-bit, group 32, symmetric",
    "gptq_2bit_act_order": "GPTQ 2-bit, group 64, asymmetric, act-order",
    "gptq_3bit_symmetric": "GPTQ 3-bit, group 32, symmetric",
    "gptq_3bit_act_order": "GPTQ 3-bit, group 64, asymmetric, act-order",
    "gptq_8bit_symmetric": "GPTQ 8-bit, group 32, symmetric",
    "gptq_8bit_act_order": "GPTQ 8-bit, group 64, asymmetric, act-order",
    "gptq_marlin": "GPTQ 4-bit, group 128, symmetric",
    "gptq_marlin_one_group": "GPTQ 4-bit, one group per column, symmetric",
    "awq_gemm": "AWQ 4-bit, group 32, asymmetric",
    "awq_gemm_zero_points_of_zero": "AWQ 4-bit, group 64, asymmetric",
}


def read(case: str) -> tuple[QuantizedWeight, dict[str, Tensor], Tensor]:
    """Our weight, what the packer was given, and the stored scales of every element [K, N]."""
    with_prefix = load_file(FIXTURES / "expected.safetensors") | load_file(FIXTURES / "expected_gptq.safetensors")
    expected = {key.removeprefix(f"{case}."): t for key, t in with_prefix.items() if key.startswith(f"{case}.")}
    stored = load_file(FIXTURES / case / "model.safetensors")
    weight = open_checkpoint(FIXTURES / case).linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    order = stored.get(f"{MODULE}.g_idx", torch.arange(weight.K) // weight.group_size)
    scales = (expected["scales"] if "scales" in expected else stored[f"{MODULE}.scales"])[order]
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


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_that_autogptq_destroyed_are_counted_and_all_others_exact(bits: int) -> None:
    case = "gptq_zero_points_of_zero" if bits == 4 else f"gptq_{bits}bit_zero_points_of_zero"
    weight, expected, scales = read(case)
    exact = (scales.double() * (expected["codes"].int() - expected["zeros_of_rows"]).double()).t()
    # A zero point of 0 takes those that begin behind it in its word of 32 bits with it.
    word_of = torch.arange(weight.N) * bits // 32
    destroyed = torch.zeros(expected["zeros"].shape, dtype=torch.bool)
    for group, column in (expected["zeros"] == 0).nonzero().tolist():
        destroyed[group, column + 1 :] |= word_of[column + 1 :] == word_of[column]
    words = {(group, int(word_of[column])) for group, column in destroyed.nonzero().tolist()}
    assert words
    (warning,) = open_checkpoint(FIXTURES / case).report.warnings
    assert warning.startswith(f"{len(words)} words of zero points (the first in {MODULE}.qzeros)")
    assert "AutoGPTQ" in warning
    intact = ~destroyed[torch.arange(weight.K) // weight.group_size].t()
    assert torch.equal(weight.dequantize().double()[intact], exact[intact])
