"""AutoAWQ's gemv and gemv_fast files (fixtures/write_fixtures.py) read by ours: every weight exactly."""

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
# Case -> layout and what describe() says.
CASES = {
    "awq_gemv": ("gemv", "AWQ 4-bit, group 128, asymmetric"),
    "awq_gemv_group_64": ("gemv", "AWQ 4-bit, group 64, asymmetric"),
    "awq_gemv_zero_points_of_zero": ("gemv", "AWQ 4-bit, group 32, asymmetric"),
    "awq_gemv_fast": ("gemv_fast", "AWQ 4-bit, group 128, asymmetric"),
    "awq_gemv_fast_zero_points_of_zero": ("gemv_fast", "AWQ 4-bit, group 64, asymmetric"),
}


def read(case: str) -> tuple[QuantizedWeight, dict[str, Tensor]]:
    """Our weight and what the packer was given."""
    with_prefix = load_file(FIXTURES / "expected_gemv.safetensors")
    weight = open_checkpoint(FIXTURES / case).linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    return weight, {key.removeprefix(f"{case}."): t for key, t in with_prefix.items() if key.startswith(f"{case}.")}


@pytest.mark.parametrize("case", CASES)
def test_the_layout_is_found(case: str) -> None:
    report = open_checkpoint(FIXTURES / case).report
    assert (report.variant, report.describe()) == CASES[case]
    assert report.warnings == ()
    assert CASES[case][0] in report.evidence[0]


@pytest.mark.parametrize("case", CASES)
def test_the_weight_is_the_packers_integers_and_scales_exactly(case: str) -> None:
    weight, expected = read(case)
    assert torch.equal(weight.codes, expected["codes"])
    assert torch.equal(weight.scales, expected["scales"].float())
    product = expected["scales"].float() * expected["zeros"].float()  # exact
    # gemv_fast stores the product in the dtype of the scales.
    assert torch.equal(-weight.offsets, product if CASES[case][0] == "gemv" else product.half().float())


@pytest.mark.parametrize("case", CASES)
def test_the_weight_in_fp16_is_what_its_bit_fields_say(case: str) -> None:
    weight, expected = read(case)
    assert torch.equal(weight.dequantize(torch.float16), expected["dequantized"].t())
