"""The self-test: right kernels and weights pass it, every kind of wrong one is named."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from appliance.kernels import registry
from appliance.kernels.registry import KERNELS
from appliance.kernels.spec import AffineWeight, KernelEntry, Phase, Target
from appliance.model_details import Verdict
from appliance.quant.linear import spec_of
from appliance.quant.planner import LinearPlanner
from appliance.quant.self_test import BOUNDS, Reference, kernel_error, weight_fault
from appliance.quant.weight import QuantizedWeight
from tests.kernels.test_linear import WEIGHTS, random_weight

TARGET = Target("cpu", torch.bfloat16, keep_dense=True)
WEIGHT = random_weight(256, 64, 32, act_order=True)


class ReferenceKernel:
    """Computes what it is told to, as the reference does."""

    name: ClassVar[str] = "reference"
    nbytes = 0

    def __init__(self, weight: AffineWeight | Tensor, spoil: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        self.dense = weight if isinstance(weight, Tensor) else weight.dequantize()
        self.spoil = spoil

    def __call__(self, x: Tensor) -> Tensor:
        return self.spoil((x.float() @ self.dense.float().t()).to(x.dtype))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", WEIGHTS)
def test_every_kernel_passes_with_room_to_spare(case: str, dtype: torch.dtype) -> None:
    weight, target = WEIGHTS[case], Target("cpu", dtype, keep_dense=True)
    reference = Reference.of(weight, dtype)
    entries = [entry for entry in KERNELS if entry.refuse(spec_of(weight), target) is None]
    assert entries
    for entry in entries:
        kernel = entry.pack(weight, dtype)
        errors = [kernel_error(kernel, phase, reference) for phase in entry.phases]
        assert max(errors) < 0.6 * BOUNDS[dtype], entry.name


def zero_points_off_by_one(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, offsets=weight.offsets - weight.scales)


def scales_of_the_next_group(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, scales=weight.scales.roll(1, 0))


def codes_of_the_next_row(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, codes=weight.codes.view(-1, 2, weight.N).flip(1).reshape(weight.K, weight.N))


def act_order_ignored(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, perm=None)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "mistake", [zero_points_off_by_one, scales_of_the_next_group, codes_of_the_next_row, act_order_ignored]
)
def test_a_kernel_that_reads_the_weight_wrongly_fails(
    mistake: Callable[[QuantizedWeight], QuantizedWeight], dtype: torch.dtype
) -> None:
    reference = Reference.of(WEIGHT, dtype)
    assert kernel_error(ReferenceKernel(WEIGHT), Phase.PREFILL, reference) < BOUNDS[dtype]
    assert kernel_error(ReferenceKernel(mistake(WEIGHT)), Phase.PREFILL, reference) > 2 * BOUNDS[dtype]


def one_output_is_nan(y: Tensor) -> Tensor:
    return y.index_fill(1, torch.tensor([y.shape[1] - 1]), math.nan)


def last_columns_are_zero(y: Tensor) -> Tensor:
    return torch.cat([y[:, :-16], torch.zeros_like(y[:, -16:])], 1)


def last_row_is_zero(y: Tensor) -> Tensor:
    return torch.cat([y[:-1], torch.zeros_like(y[-1:])])


@pytest.mark.parametrize("spoil", [one_output_is_nan, last_columns_are_zero, last_row_is_zero])
@pytest.mark.parametrize("phase", Phase)
def test_a_kernel_that_leaves_outputs_out_fails(spoil: Callable[[Tensor], Tensor], phase: Phase) -> None:
    reference = Reference.of(WEIGHT, torch.bfloat16)
    assert kernel_error(ReferenceKernel(WEIGHT, spoil), phase, reference) > BOUNDS[torch.bfloat16]


def test_a_column_of_tiny_scales_fails_no_kernel_and_a_wide_layer_is_sampled() -> None:
    """Dead outputs have scales that float16 rounds to nothing: that is no kernel's fault."""
    scales = WEIGHT.scales.clone()
    scales[:, 3] = 1e-9
    weight = replace(WEIGHT, scales=scales, offsets=-8 * scales, zeros=None)
    reference = Reference.of(weight, torch.float16)
    half = ReferenceKernel(weight.dequantize(torch.float16))
    assert kernel_error(half, Phase.PREFILL, reference) < BOUNDS[torch.float16]
    wide = Reference.of(torch.ones(5000, 512), torch.bfloat16)
    assert wide.expected.shape[1] == 1024
    assert [int(wide.columns[0]), int(wide.columns[-1])] == [0, 4999]


def test_a_layer_is_tested_in_the_dtype_that_it_is_computed_in() -> None:
    """A router in float32 beside layers of the same spec in bfloat16."""
    planner = LinearPlanner(TARGET)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    layers = [planner.linear("usual", weight, None), planner.linear("router", weight, None, torch.float32)]
    assert {test.layer: test.bound for test in planner.tests} == {
        "usual": BOUNDS[torch.bfloat16],
        "router": BOUNDS[torch.float32],
    }
    assert "2 kinds of layer" in planner.self_test.summary
    for layer, dtype in zip(layers, (torch.bfloat16, torch.float32), strict=True):
        assert layer(torch.ones(1, 256, dtype=dtype), 1).dtype == dtype


def spoiled(part: str, value: float) -> QuantizedWeight:
    tensor = getattr(WEIGHT, part).clone()
    tensor[1, 2] = value
    return replace(WEIGHT, **{part: tensor})


FLIPPED = float((WEIGHT.scales[1, 2].half().view(torch.int16) ^ 0x4000).view(torch.float16))
"""A scale whose highest bit of exponent is another."""
DENSE = torch.randn(8, 16)


@pytest.mark.parametrize(
    ("weight", "dtype", "words"),
    [
        (spoiled("scales", math.nan), torch.bfloat16, "its scales hold NaN or infinity"),
        (spoiled("scales", math.inf), torch.bfloat16, "its scales hold NaN or infinity"),
        (spoiled("offsets", math.nan), torch.bfloat16, "its offsets hold NaN or infinity"),
        (spoiled("offsets", -6e4), torch.bfloat16, "its largest offset is 6e\\+04, and the median of its scales 0.0"),
        (spoiled("scales", FLIPPED), torch.bfloat16, "its largest scale is .* times the median of 0.0"),
        (replace(WEIGHT, codes=torch.full_like(WEIGHT.codes, 7)), torch.bfloat16, "every code is 7"),
        (replace(WEIGHT, scales=torch.zeros_like(WEIGHT.scales)), torch.bfloat16, "every scale is 0"),
        (torch.zeros(8, 16), torch.bfloat16, "every weight is 0"),
        (DENSE.index_fill(1, torch.tensor([3]), math.nan), torch.bfloat16, "it holds NaN or infinity"),
        (DENSE.index_fill(1, torch.tensor([3]), -math.inf), torch.bfloat16, "it holds NaN or infinity"),
        (
            DENSE.index_fill(1, torch.tensor([3]), -1e5),
            torch.float16,
            "it holds 1e\\+05, beyond the .* of float16",
        ),
    ],
)
def test_a_weight_that_cannot_be_right_is_named(
    weight: QuantizedWeight | Tensor, dtype: torch.dtype, words: str
) -> None:
    fault = weight_fault(weight, dtype)
    assert fault is not None
    assert re.match(words, fault), fault


HALF_EMPTY = replace(WEIGHT, scales=WEIGHT.scales * (torch.arange(64) % 3 > 1))


@pytest.mark.parametrize("weight", [*WEIGHTS.values(), HALF_EMPTY, spoiled("scales", -0.02), DENSE])
def test_sound_weights_pass_with_negative_and_with_empty_groups(weight: QuantizedWeight | Tensor) -> None:
    assert weight_fault(weight, torch.bfloat16) is None


class KernelOf:
    """A line of the registry whose kernel computes as the reference and spoils the result."""

    def __init__(self, name: str, spoil: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        self.packed = 0

        class Kernel(ReferenceKernel):
            pass

        Kernel.name = name

        def pack(weight: AffineWeight | Tensor, dtype: torch.dtype) -> ReferenceKernel:
            self.packed += 1
            return Kernel(weight, spoil)

        self.entry = KernelEntry(name, frozenset(Phase), lambda spec, target: None, pack)


def crash(_: Tensor) -> Tensor:
    raise RuntimeError("out of shared memory")


def out_of_memory(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (one_output_is_nan, "NaN or infinite"),
        (last_row_is_zero, "off by"),
        (crash, "RuntimeError: out of shared memory"),
    ],
)
def test_a_failing_kernel_is_struck_off_loudly_for_all_layers_of_its_spec(
    spoil: Callable[[Tensor], Tensor], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = KernelOf("bad", spoil), KernelOf("good")
    monkeypatch.setattr(registry, "KERNELS", (bad.entry, good.entry))
    planner = LinearPlanner(TARGET)
    first, *others = (planner.linear(f"model.layers.{n}.up", WEIGHT, None) for n in range(3))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "kernel bad is struck off for layers of K=256 N=64 4-bit group 32 act-order" in record.getMessage()
    assert bad.packed == 1
    assert {layer.plan.decode.name for layer in (first, *others)} == {"good"}
    (refused,) = first.plan.rejected
    assert refused[0] == "bad"
    assert words in refused[1]
    assert planner.self_test.verdict is Verdict.PASSED
    assert "struck off" in planner.self_test.summary


def test_another_spec_is_tested_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    moody = KernelOf("moody", lambda y: y if y.shape[1] == 64 else y * 2)
    monkeypatch.setattr(registry, "KERNELS", (moody.entry, KernelOf("good").entry))
    planner = LinearPlanner(TARGET)
    assert planner.linear("wide", WEIGHT, None).plan.decode.name == "moody"
    assert planner.linear("narrow", random_weight(64, 32, 32), None).plan.decode.name == "good"


def test_a_layer_that_no_kernel_computes_rightly_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", (KernelOf("bad", crash).entry, KernelOf("worse", last_row_is_zero).entry))
    planner = LinearPlanner(TARGET)
    layer = planner.linear("model.layers.0.up", WEIGHT, None)
    assert layer.plan.decode.name == "bad", "whoever insists gets what was planned"
    (fault,) = planner.faults
    assert fault.startswith("model.layers.0.up: no kernel is left for it")
    assert "bad: failed its self-test" in fault
    assert "worse: failed its self-test" in fault
    assert planner.self_test.verdict is Verdict.FAILED


def test_kernels_are_not_blamed_for_a_damaged_weight_nor_tested_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", (KernelOf("bad", last_row_is_zero).entry, KernelOf("good").entry))
    planner = LinearPlanner(TARGET)
    for module, weight in {"q": WEIGHT, "k": spoiled("scales", math.nan)}.items():
        planner.check_weight(module, weight)
    planner.linear("q + k", random_weight(256, 64, 32, act_order=True), None)
    assert planner.faults == ["k: its scales hold NaN or infinity"]
    assert planner.self_test.kernels == ()
    assert planner.linear("model.layers.1.up", WEIGHT, None).plan.decode.name == "good"


def test_running_out_of_memory_is_no_kernels_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", (KernelOf("hungry", out_of_memory).entry,))
    with pytest.raises(torch.OutOfMemoryError):
        LinearPlanner(TARGET).linear("model.layers.0.up", WEIGHT, None)


def test_norms_and_embeddings_are_looked_at() -> None:
    planner = LinearPlanner(TARGET)
    planner.check("model.norm.weight", torch.tensor([1.0, math.nan]))
    planner.check("model.embed_tokens.weight", torch.ones(4, 4))
    assert planner.faults == ["model.norm.weight: it holds NaN or infinity"]
