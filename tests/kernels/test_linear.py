"""Every linear kernel of the registry against the reference, and the plans it is chosen by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels import cpu_onednn
from appliance.kernels.reference.linear import linear as reference
from appliance.kernels.registry import KERNELS, NoKernelError, plan_linear
from appliance.kernels.spec import LinearSpec, Phase, Target
from appliance.quant.linear import PlannedLinear, spec_of
from appliance.quant.weight import QuantizedWeight, concatenate

# Of the largest output. fp32: sums in another order. bf16: 8 bits in weight (or scale), activation and output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def random_weight(K: int, N: int, group_size: int, bits: int = 4, act_order: bool = False) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(K * N + group_size)
    groups = -(-K // group_size)
    scales = torch.rand(groups, N, generator=generator) * 0.02 + 0.01
    zeros = torch.randint(0, 1 << bits, (groups, N), generator=generator, dtype=torch.int32)
    return QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (K, N), generator=generator, dtype=torch.uint8),
        scales=scales,
        offsets=-scales * zeros,
        bits=bits,
        group_size=group_size,
        zeros=zeros,
        perm=torch.randperm(K, generator=generator) if act_order else None,
    )


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], f"error {error:.2e} of the largest output"


WEIGHTS = {
    "K64-N48-g32": random_weight(64, 48, 32),
    "K160-N80-g128-tail": random_weight(160, 80, 128),
    "K128-N16-one-group": random_weight(128, 16, 128),
    "K384-N32-g384-expanded": random_weight(384, 32, 384),
    "K96-N13-g32-odd": random_weight(96, 13, 32),
    "K64-N32-g16": random_weight(64, 32, 16),
    "K64-N32-g32-act-order": random_weight(64, 32, 32, act_order=True),
    "K64-N32-8bit": random_weight(64, 32, 32, bits=8),
    "K160-N32-2bit-act-order-tail": random_weight(160, 32, 64, bits=2, act_order=True),
    "K64-N32-3bit": random_weight(64, 32, 16, bits=3),
    "K33-N17-g11-odd": random_weight(33, 17, 11),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("keep_dense", [True, False], ids=["dense-copy", "no-copy"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_kernels_equal_the_reference(name: str, keep_dense: bool, dtype: torch.dtype) -> None:
    """Each kernel that takes the layer computes it, for one row and for many."""
    weight = WEIGHTS[name]
    target = Target("cpu", dtype, keep_dense)
    ran = 0
    for entry in KERNELS:
        if entry.refuse(spec_of(weight), target) is not None:
            continue
        kernel = entry.pack(weight, dtype)
        for rows in (1, 3, 17):
            x = torch.randn(rows, weight.K, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert_close(kernel(x), reference(x, weight), dtype)
        assert kernel.nbytes > 0
        ran += 1
    assert ran >= 1


def test_int4_row_does_not_depend_on_its_neighbours() -> None:
    """A decode row is bit-equal alone and in any batch."""
    weight = random_weight(576, 64, 32)
    kernel = PlannedLinear("layer", weight, None, Target("cpu", torch.bfloat16, True)).decode
    x = torch.randn(33, 576).bfloat16()
    together = kernel(x)
    for row in (0, 7, 32):
        assert torch.equal(kernel(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(("K", "N"), [(576, 960), (1536, 576), (96, 13)])
def test_dense_row_does_not_depend_on_its_neighbours(K: int, N: int) -> None:
    """Neither does a bf16 prefill row, single or not."""
    kernel = cpu_onednn.pack(torch.randn(N, K, generator=torch.Generator().manual_seed(2)), torch.bfloat16)
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(3)).bfloat16()
    together = kernel(x)
    for start, stop in (*((row, row + 1) for row in range(64)), (3, 5), (7, 24), (31, 64)):
        assert torch.equal(kernel(x[start:stop]), together[start:stop])


def test_mixed_step_runs_each_row_by_its_phase() -> None:
    """Decode rows of a mixed step equal those of a decode-only step bit for bit; so do prefill rows."""
    weight = random_weight(64, 48, 32)
    bias = torch.randn(48)
    layer = PlannedLinear("layer", weight, bias, Target("cpu", torch.bfloat16, True))
    assert (layer.plan.decode.name, layer.plan.prefill.name) == ("cpu_int4", "cpu_onednn")
    x = torch.randn(9, 64).bfloat16()
    mixed = layer(x, 4)
    assert torch.equal(mixed[:4], layer(x[:4], 4))
    assert torch.equal(mixed[4:], layer(x[4:], 0))
    assert_close(mixed, reference(x, weight) + bias, torch.bfloat16)


def test_plan_names_why_candidates_were_refused() -> None:
    plan = plan_linear(LinearSpec(64, 32, 4, 16), Target("cpu", torch.bfloat16, False))
    assert plan.kernel_names == ("cpu_dequantize",)
    reasons = dict(plan.rejected)
    assert "found 16" in reasons["cpu_int4"]
    assert "dense copy" in reasons["cpu_dense"]
    assert "dense copy" in reasons["cpu_onednn"]


def test_a_layer_that_nothing_runs_is_refused_with_all_reasons() -> None:
    with pytest.raises(NoKernelError) as caught:
        plan_linear(LinearSpec(64, 32, 4, 16), Target("cuda", torch.float16, True))
    assert all(entry.name in str(caught.value) for entry in KERNELS)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.up"):
        PlannedLinear("model.layers.0.up", random_weight(64, 32, 16), None, Target("cuda", torch.float16, True))


def test_exact_mode_is_one_dense_kernel() -> None:
    plan = plan_linear(LinearSpec(64, 32, 4, 32), Target("cpu", torch.float32, True))
    assert plan.decode is plan.prefill
    assert plan.decode.name == "cpu_dense"
    assert {entry.name for entry in KERNELS if Phase.PREFILL in entry.phases} >= {"cpu_dense", "cpu_dequantize"}


def test_fused_weight_equals_its_parts() -> None:
    parts = [random_weight(64, n, 32) for n in (32, 16, 16)]
    fused = concatenate(parts)
    assert fused is not None
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))
    assert concatenate([parts[0], random_weight(64, 16, 16)]) is None
    assert concatenate([parts[0], random_weight(64, 16, 32, act_order=True)]) is None
