"""A linear layer that holds its weight in the layouts its plan names and runs rows by phase."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels.registry import LinearPlan, NoKernelError, plan_linear
from appliance.kernels.spec import LinearSpec, Target
from appliance.quant.weight import QuantizedWeight

_SAMPLE_COLUMNS = 128
"""Whole tiles of every kernel's layout."""


def spec_of(weight: QuantizedWeight | Tensor) -> LinearSpec:
    """Shape and storage of a weight; a dense one is [N, K]."""
    if isinstance(weight, QuantizedWeight):
        return LinearSpec(weight.K, weight.N, weight.bits, weight.group_size, weight.perm is not None)
    return LinearSpec(weight.shape[1], weight.shape[0], 8 * weight.element_size())


class PlannedLinear:
    """y = x @ W + bias, decode rows through one kernel and prefill rows through another (often the same)."""

    def __init__(
        self,
        name: str,
        weight: QuantizedWeight | Tensor,
        bias: Tensor | None,
        target: Target,
        struck: Mapping[str, str] | None = None,
    ) -> None:
        """Plans and packs. Raises UnsupportedModelError naming the layer when no kernel takes it.

        struck: kernels that failed their test with such a layer, and how.
        """
        self.name = name
        try:
            self.plan: LinearPlan = plan_linear(spec_of(weight), target, struck or {})
        except NoKernelError as error:
            raise UnsupportedModelError(f"Layer {name}: {error}.") from error
        weight = weight.to(target.location)
        self.decode = self.plan.decode.pack(weight, target.dtype)
        same = self.plan.prefill is self.plan.decode
        self.prefill = self.decode if same else self.plan.prefill.pack(weight, target.dtype)
        self.bias = None if bias is None else bias.to(target.location, target.dtype)

    @property
    def nbytes(self) -> int:
        """Of the weight in its layouts, without the bias."""
        kernels = {id(k): k.nbytes for k in (self.decode, self.prefill)}
        return sum(kernels.values())

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        """x [T, K], whose first num_decode rows are decodes -> [T, N]."""
        if self.decode is self.prefill or num_decode == x.shape[0]:
            y = self.decode(x)
        elif num_decode == 0:
            y = self.prefill(x)
        else:
            y = torch.cat([self.decode(x[:num_decode]), self.prefill(x[num_decode:])])
        return y if self.bias is None else y.add_(self.bias)


def packed_bytes(plan: LinearPlan, dtype: torch.dtype) -> int:
    """About how many bytes a layer takes in the layouts of its plan, from its spec alone: every layout is linear in N
    but for padding, so a few columns are packed and scaled up. One that leaves out the offsets of symmetric weights
    takes less than is said here.
    """
    spec = plan.spec
    columns = min(spec.N, _SAMPLE_COLUMNS)
    if spec.is_quantized:
        generator = torch.Generator().manual_seed(0)
        shape = (-(-spec.K // spec.group_size), columns)
        codes = torch.randint(0, 1 << spec.bits, (spec.K, columns), generator=generator, dtype=torch.uint8)
        weight: QuantizedWeight | Tensor = QuantizedWeight(
            codes, torch.ones(shape), torch.ones(shape), spec.bits, spec.group_size
        )
    else:
        weight = torch.zeros(columns, spec.K, dtype=torch.float32 if spec.bits == 32 else torch.bfloat16)
    sizes = [entry.pack(weight, dtype).nbytes for entry in dict.fromkeys((plan.decode, plan.prefill))]
    perm_bytes = 8 * spec.K if spec.has_perm else 0
    return sum(-(-size * spec.N // columns) + perm_bytes for size in sizes)
