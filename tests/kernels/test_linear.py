"""Every linear kernel of the registry against the reference, and the plans it is chosen by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels import cpu_int4, cpu_onednn, dequantize, registry
from appliance.kernels.reference.linear import linear as reference
from appliance.kernels.registry import KERNELS, NoKernelError, plan_linear
from appliance.kernels.spec import LinearSpec, Phase, Target
from appliance.quant.linear import PlannedLinear, spec_of
from appliance.quant.weight import QuantizedWeight, concatenate

# Of the largest output. fp32: sums in another order. bf16: 8 bits in weight (or scale), activation and output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


DENSE_REASON = "needs a dense copy, for which the memory plan has no room"


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
    "K64-N32-g32-act-order": random_weight(64, 32, 32, act_order=True),
    "K64-N32-2bit": random_weight(64, 32, 32, bits=2),
    "K64-N32-3bit": random_weight(64, 32, 64, bits=3),
    "K100-N32-one-group-padded": random_weight(100, 32, 100),
    "K64-N32-g128-beyond-K": random_weight(64, 32, 128),
    "K150-N20-g64-tail-3bit-act-order": random_weight(150, 20, 64, bits=3, act_order=True),
    "K192-N16-g96": random_weight(192, 16, 96),
}
"""What the fused 4-bit kernel takes too."""
OTHER_WEIGHTS = {
    "K64-N32-g16": random_weight(64, 32, 16),
    "K33-N17-g11-odd": random_weight(33, 17, 11),
    **{f"K64-N32-g16-{bits}bit": random_weight(64, 32, 16, bits) for bits in (2, 3, 5, 6, 8)},
    **{f"K64-N32-g32-{bits}bit": random_weight(64, 32, 32, bits) for bits in (5, 6, 7, 8)},
    **{f"K72-N24-g16-tail-{bits}bit": random_weight(72, 24, 16, bits) for bits in (2, 3, 5, 6, 8)},
    **{f"K70-N24-one-group-{bits}bit": random_weight(70, 24, 70, bits) for bits in (5, 6, 8)},
    **{f"K75-N24-g32-tail-act-order-{bits}bit": random_weight(75, 24, 32, bits, True) for bits in (5, 6, 8)},
    **{f"K64-N32-g16-act-order-{bits}bit": random_weight(64, 32, 16, bits, True) for bits in (2, 3, 6)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("keep_dense", [True, False], ids=["dense-copy", "no-copy"])
@pytest.mark.parametrize("name", [*WEIGHTS, *OTHER_WEIGHTS])
def test_kernels_equal_the_reference(name: str, keep_dense: bool, dtype: torch.dtype) -> None:
    """Each kernel that takes the layer computes it, for one row and for many."""
    weight = (WEIGHTS | OTHER_WEIGHTS)[name]
    target = Target("cpu", dtype, keep_dense)
    ran = set()
    for entry in KERNELS:
        if entry.refuse(spec_of(weight), target) is not None:
            continue
        kernel = entry.pack(weight, dtype)
        for rows in (1, 3, 17):
            x = torch.randn(rows, weight.K, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert_close(kernel(x), reference(x, weight), dtype)
        assert kernel.nbytes > 0
        ran.add(entry.name)
    expected = {"dequantize"}
    if dtype == torch.bfloat16 and name in WEIGHTS:
        expected.add("cpu_int4")
    if keep_dense:
        expected |= {"dense", "cpu_onednn"}
    assert ran == expected


@pytest.mark.parametrize("name", WEIGHTS)
def test_int4_weights_differ_by_the_rounding_of_scales_alone(name: str) -> None:
    """Each element, read by a unit row: (code - middle) * scale + (offset + middle * scale), both rounded to bf16."""
    weight = WEIGHTS[name]
    middle = 1 << weight.bits >> 1
    group = torch.arange(weight.K) // weight.group_size
    scales = weight.scales.bfloat16().float()[group]
    shifts = (weight.offsets + middle * weight.scales).bfloat16().float()[group]
    expected = ((weight.codes.float() - middle) * scales + shifts).bfloat16()
    units = torch.eye(weight.K)
    if weight.perm is not None:
        units = units[weight.perm]  # its row i meets the weight's row i
    assert torch.equal(cpu_int4.pack(weight, torch.bfloat16)(units.bfloat16()), expected)


@pytest.mark.parametrize("weight", [random_weight(576, 64, 32), random_weight(100, 20, 100)], ids=["whole", "padded"])
def test_int4_row_does_not_depend_on_its_neighbours(weight: QuantizedWeight) -> None:
    """A decode row is bit-equal alone and in any batch."""
    kernel = PlannedLinear("layer", weight, None, Target("cpu", torch.bfloat16, True)).decode
    x = torch.randn(33, weight.K).bfloat16()
    together = kernel(x)
    for row in (0, 7, 32):
        assert torch.equal(kernel(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("K", "N"), [(576, 960), (1536, 576), (96, 13)])
def test_dense_row_does_not_depend_on_its_neighbours(K: int, N: int, dtype: torch.dtype) -> None:
    """Neither does a dense row, single or not, in batches of every size and however threads share them."""
    kernel = cpu_onednn.pack(torch.randn(N, K, generator=torch.Generator().manual_seed(2)), dtype)
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(3)).to(dtype)
    together = kernel(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for start, stop in (*((row, row + 1) for row in range(64)), *((3, 3 + rows) for rows in range(2, 61))):
                assert torch.equal(kernel(x[start:stop]), together[start:stop])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_dequantised_row_does_not_depend_on_its_neighbours(threads: int) -> None:
    """Single rows are many where experts share a prompt's rows. In these shapes oneDNN treats one alone otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for K, N in ((1408, 2048), (2048, 1536)):
            kernel = dequantize.pack(random_weight(K, N, 64), torch.bfloat16)
            x = torch.randn(17, K, generator=torch.Generator().manual_seed(3)).bfloat16()
            together = kernel(x)
            for start, stop in ((0, 1), (5, 6), (16, 17), (3, 5), (2, 11)):
                assert torch.equal(kernel(x[start:stop]), together[start:stop])
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (LinearSpec(64, 32, 4, 16), "needs groups of a multiple of 32 rows or one over all of K, found 16"),
        (LinearSpec(64, 32, 6, 32), "needs codes of at most 4 bits, found 6"),
        (LinearSpec(64, 32, 16), "needs a quantised weight, found a dense one"),
    ],
)
def test_plan_names_why_candidates_were_refused(spec: LinearSpec, reason: str) -> None:
    plan = plan_linear(spec, Target("cpu", torch.bfloat16, False))
    assert plan.kernel_names == ("dequantize" if spec.is_quantized else "cpu_onednn",)
    reasons = dict(plan.rejected)
    assert reasons["cpu_int4"] == reason
    if spec.is_quantized:
        assert reasons["dense"] == reasons["cpu_onednn"] == DENSE_REASON
    else:
        assert reasons["dequantize"] == reason


def test_the_dense_mode_names_why_the_fused_kernel_was_refused() -> None:
    reasons = dict(plan_linear(LinearSpec(64, 32, 4, 32), Target("cpu", torch.float32, True)).rejected)
    assert reasons["cpu_int4"] == "needs bfloat16 activations, found float32"


def test_a_layer_that_nothing_runs_is_refused_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels that run anything."""
    narrow = tuple(entry for entry in KERNELS if entry.name not in ("dense", "dequantize"))
    monkeypatch.setattr(registry, "KERNELS", narrow)
    with pytest.raises(NoKernelError) as caught:
        plan_linear(LinearSpec(64, 32, 4, 16), Target("cuda", torch.float16, False))
    assert all(entry.name in str(caught.value) for entry in narrow)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.up"):
        PlannedLinear("model.layers.0.up", random_weight(64, 32, 16), None, Target("cuda", torch.float16, False))


@pytest.mark.parametrize(
    ("spec", "dtype", "kernel"),
    [
        (LinearSpec(5120, 13824, 4, 128), torch.float16, "triton_w4a16"),
        (LinearSpec(5120, 13824, 4, 5120, has_perm=True), torch.bfloat16, "triton_w4a16"),
        (LinearSpec(5120, 13824, 3, 64), torch.float16, "triton_w4a16"),
        (LinearSpec(5120, 13824, 8, 128), torch.float16, "dequantize"),
        (LinearSpec(5120, 152064, 16), torch.float16, "dense"),
        (LinearSpec(5120, 13824, 4, 128), torch.float32, "dense"),  # the exact mode
    ],
    ids=str,
)
def test_plan_on_a_card(spec: LinearSpec, dtype: torch.dtype, kernel: str) -> None:
    plan = plan_linear(spec, Target("cuda", dtype, dtype == torch.float32))
    assert plan.kernel_names == (kernel,)


def test_exact_mode_is_one_dense_kernel() -> None:
    plan = plan_linear(LinearSpec(64, 32, 4, 32), Target("cpu", torch.float32, True))
    assert plan.decode is plan.prefill
    assert plan.decode.name == "cpu_onednn"
    assert {entry.name for entry in KERNELS if Phase.PREFILL in entry.phases} >= {"dense", "dequantize"}


def test_fused_weight_equals_its_parts() -> None:
    parts = [random_weight(64, n, 32) for n in (32, 16, 16)]
    fused = concatenate(parts)
    assert fused is not None
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))
    assert concatenate([parts[0], random_weight(64, 16, 16)]) is None
    assert concatenate([parts[0], random_weight(64, 16, 32, act_order=True)]) is None
