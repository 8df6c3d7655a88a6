"""Plans, packs and tests the layers of one model: the first sound layer of each spec is run by every kernel that its
plan names, and a kernel that fails is struck off for all layers of that spec, loudly.

Knows what was found so far; whoever loads the model decides what a fault means.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels.registry import LinearPlan, NoKernelError, plan_linear
from appliance.kernels.spec import LinearKernel, LinearSpec, Phase, Target
from appliance.model_details import KernelTest, SelfTest, Verdict
from appliance.quant.linear import PlannedLinear, packed_bytes, spec_of
from appliance.quant.self_test import BOUNDS, Reference, kernel_error, tensor_fault, weight_fault
from appliance.quant.weight import QuantizedWeight

log = logging.getLogger(__name__)

Kind = tuple[LinearSpec, torch.dtype]
"""What kernels are chosen by: the weight, and the dtype of activations."""


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """What is remembered of a layer. nbytes: of its packed weight and its bias."""

    name: str
    plan: LinearPlan
    nbytes: int


class LinearPlanner:
    """Hands out layers that are planned, packed and, the first of each spec, tested."""

    def __init__(self, target: Target, keeps_layers: bool = True) -> None:
        """keeps_layers: False for a survey, in which all layers of a spec are the first one's kernels: the others are
        looked at, but not packed.
        """
        self.target = target
        self.layers: list[PlannedLayer] = []
        self.faults: list[str] = []
        self.tests: list[KernelTest] = []
        self._damaged: set[str] = set()
        self._sizes: dict[Kind, int] = {}
        self._struck: dict[Kind, dict[str, str]] = {}
        """Of every kind that was tested."""
        self._examples: dict[Kind, PlannedLinear] | None = None if keeps_layers else {}

    def linear(
        self, name: str, weight: QuantizedWeight | Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> PlannedLinear:
        """The layer of a module, or of several (`a + b`) side by side, each of which `check_weight` has seen.

        dtype: of its activations; None for the target's. Raises UnsupportedModelError when no kernel takes it even
        before a test.
        """
        target = self._target(dtype)
        kind = (spec_of(weight), target.dtype)
        layer = None if self._examples is None else self._examples.get(kind)
        if layer is None:
            is_tested = self._damaged.isdisjoint(name.split(" + ")) and kind not in self._struck
            if is_tested:
                layer = self._tested(name, weight, bias, target)
            else:
                layer = PlannedLinear(name, weight, bias, target, self._struck.get(kind))
            if self._examples is not None and is_tested:
                self._examples[kind] = layer
        bias_bytes = 0 if bias is None else bias.numel() * target.dtype.itemsize
        self.layers.append(PlannedLayer(name, layer.plan, layer.nbytes + bias_bytes))
        return layer

    def plan(self, name: str, spec: LinearSpec, dtype: torch.dtype | None = None) -> PlannedLayer:
        """A layer planned by its spec alone, dtype as in `linear`. Raises UnsupportedModelError when no kernel takes
        it.
        """
        target = self._target(dtype)
        kind = (spec, target.dtype)
        try:
            plan = plan_linear(spec, target)
        except NoKernelError as error:
            raise UnsupportedModelError(f"Layer {name}: {error}.") from error
        if kind not in self._sizes:
            self._sizes[kind] = packed_bytes(plan, target.dtype)
        self.layers.append(PlannedLayer(name, plan, self._sizes[kind]))
        return self.layers[-1]

    def check_weight(self, module: str, weight: QuantizedWeight | Tensor) -> None:
        """Look at the weight of a linear layer: kernels are not tested with a damaged one."""
        fault = weight_fault(weight, self.target.dtype)
        if fault is not None:
            self._damaged.add(module)
            self._blame(module, fault)

    def check(self, name: str, tensor: Tensor) -> None:
        """Look at a tensor that is no linear layer's weight."""
        fault = tensor_fault(tensor, self.target.dtype)
        if fault is not None:
            self._blame(name, fault)

    @property
    def self_test(self) -> SelfTest:
        """The verdict on all that has been planned."""
        struck = sum(bool(test.reason) for test in self.tests)
        if self.faults:
            more = f"{len(self.faults)} faults, the first: " if len(self.faults) > 1 else ""
            summary = more + self.faults[0]
        else:
            kinds = len(self._struck)
            summary = (
                f"the weights of {len(self.layers)} layers look right, and kernels agree with the reference on "
                f"{kinds} kind{'s' if kinds != 1 else ''} of layer"
            )
            summary += f"; {struck} runs failed and their kernels were struck off" if struck else ""
        verdict = Verdict.FAILED if self.faults else Verdict.PASSED
        return SelfTest(verdict, summary, tuple(self.faults), tuple(self.tests))

    def _target(self, dtype: torch.dtype | None) -> Target:
        return self.target if dtype is None else replace(self.target, dtype=dtype)

    def _tested(
        self, name: str, weight: QuantizedWeight | Tensor, bias: Tensor | None, target: Target
    ) -> PlannedLinear:
        """The layer with the first kernels that pass; with those planned first, and a fault, where none does."""
        weight = weight.to(target.location)
        kind = (spec_of(weight), target.dtype)
        reference = Reference.of(weight, target.dtype)
        struck: dict[str, str] = {}
        while True:
            try:
                layer = PlannedLinear(name, weight, bias, target, struck)
            except UnsupportedModelError as error:
                if not struck:
                    raise
                self._blame(name, f"no kernel is left for it ({error.message.removesuffix('.')})")
                self._struck[kind] = {}
                return PlannedLinear(name, weight, bias, target)
            failed = {test.kernel: test.reason for test in self._run(layer, reference) if test.reason}
            if not failed:
                self._struck[kind] = struck
                return layer
            for kernel, reason in failed.items():
                log.warning("kernel %s is struck off for layers of %s: %s", kernel, layer.plan.spec, reason)
                struck[kernel] = reason

    def _run(self, layer: PlannedLinear, reference: Reference) -> list[KernelTest]:
        kernels = {Phase.DECODE: layer.decode, Phase.PREFILL: layer.prefill}
        tests = [_test_kernel(layer, phase, kernel, reference) for phase, kernel in kernels.items()]
        self.tests += tests
        return tests

    def _blame(self, name: str, fault: str) -> None:
        self.faults.append(f"{name}: {fault}")
        log.warning("self-test: %s: %s", name, fault)


def _test_kernel(layer: PlannedLinear, phase: Phase, kernel: LinearKernel, reference: Reference) -> KernelTest:
    bound = BOUNDS[reference.x.dtype]
    reason, error = "", None
    try:
        with torch.inference_mode():
            found = kernel_error(kernel, phase, reference)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # a kernel that cannot be compiled or run is as good as one that computes nonsense
        reason = f"failed its self-test with {type(failure).__name__}: {str(failure)[:200]}"
    else:
        error = found if found < float("inf") else None
        if error is None:
            reason = "failed its self-test: an output was NaN or infinite"
        elif error > bound:
            reason = f"failed its self-test: an output was off by {error:.2g}, {bound:.2g} is allowed"
    return KernelTest(kernel.name, phase.value, str(layer.plan.spec), layer.name, bound, error, reason)
