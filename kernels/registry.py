"""Which kernel runs a linear layer: an ordered list of candidates, each of which says yes or why not.

Adding a kernel is a module with `refuse` and `pack` and one line in KERNELS. Nothing falls back silently: a layer that
no kernel takes is refused with every candidate's reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.kernels import cpu_int4, cpu_onednn, dense, dequantize, triton_linear
from appliance.kernels.spec import KernelEntry, LinearSpec, Phase, Target

BOTH = frozenset(Phase)
_NONE: Mapping[str, str] = {}

KERNELS: tuple[KernelEntry, ...] = (
    KernelEntry("cpu_int4", frozenset({Phase.DECODE}), cpu_int4.refuse, cpu_int4.pack),
    KernelEntry("cpu_onednn", BOTH, cpu_onednn.refuse, cpu_onednn.pack),
    KernelEntry("triton_w4a16", BOTH, triton_linear.refuse, triton_linear.pack),
    KernelEntry("dense", BOTH, dense.refuse, dense.pack),
    KernelEntry("dequantize", BOTH, dequantize.refuse, dequantize.pack),
)


class NoKernelError(Exception):
    """No kernel runs the layer; the text lists every candidate with its reason."""


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """The kernel for each phase of one layer, and why the candidates before it were passed over."""

    spec: LinearSpec
    decode: KernelEntry
    prefill: KernelEntry
    rejected: tuple[tuple[str, str], ...]

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.decode.name, self.prefill.name)))


def plan_linear(spec: LinearSpec, target: Target, struck: Mapping[str, str] = _NONE) -> LinearPlan:
    """The first kernel of each phase that takes the layer. Raises NoKernelError listing every reason.

    struck: kernels that are not to run this layer, and why.
    """
    chosen: dict[Phase, KernelEntry] = {}
    rejected: list[tuple[str, str]] = []
    for entry in KERNELS:
        reason = struck.get(entry.name) or entry.refuse(spec, target)
        if reason is not None:
            rejected.append((entry.name, reason))
            continue
        for phase in entry.phases:
            chosen.setdefault(phase, entry)
    if len(chosen) < len(Phase):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise NoKernelError(f"no kernel runs a layer of {spec} in {target.dtype} on {target.device} ({reasons})")
    return LinearPlan(spec, chosen[Phase.DECODE], chosen[Phase.PREFILL], tuple(rejected))
