"""Whether a weight can be what a quantiser wrote, and whether a kernel computes from it what the reference computes.

Knows one layer at a time; `quant/planner.py` decides which are tested and what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from appliance.kernels.reference.linear import linear as reference_linear
from appliance.kernels.spec import LinearKernel, Phase
from appliance.quant.weight import QuantizedWeight

ROWS: Mapping[Phase, tuple[int, ...]] = {Phase.DECODE: (1, 5), Phase.PREFILL: (24,)}
"""M of the calls that are compared: kernels choose tiles by M."""

BOUNDS: Mapping[torch.dtype, float] = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 1e-4}
"""Largest error that passes, in units of the size that the terms of an output have together (root of the sum of their
squares, scale * code and offset counted apart). bfloat16 rounds to within 2**-9: an output, at most 5 or 6 units large,
to within 0.011, and every weight, scale or offset, whose errors make 0.006 together at the worst of 100,000 outputs.
0.015 was the largest seen. A zero point that is off by one moves outputs by 0.1 and more. float16 has 3 bits more.
float32 errs by the order of its sums: 1e-5 at K = 30000.
"""

MAX_RATIO = 1 << 13
"""Scales further than this above the median are absurd: a flipped high bit of an fp16 exponent makes 2**16."""

_REFERENCE_ELEMENTS, _FEWEST_COLUMNS = 1 << 19, 128
"""Of the weight that is dequantised for a test; of wider layers evenly spaced columns are compared."""
_SAMPLE = 4096
"""Scales that the median is taken of."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Random activations and what comes of them.

    x: [R, K] in the dtype of activations. columns: [C] int64, the outputs that are compared. expected: [R, C]
    float32. unit: [R, C], the size of the terms of each; a column far smaller than the others is measured by theirs.
    """

    x: Tensor
    columns: Tensor
    expected: Tensor
    unit: Tensor

    @classmethod
    def of(cls, weight: QuantizedWeight | Tensor, dtype: torch.dtype) -> Reference:
        """weight: canonical or dense [N, K], on the device that the kernels compute on."""
        N, K = (weight.N, weight.K) if isinstance(weight, QuantizedWeight) else weight.shape
        device = weight.codes.device if isinstance(weight, QuantizedWeight) else weight.device
        count = min(N, max(_FEWEST_COLUMNS, _REFERENCE_ELEMENTS // K))
        columns = torch.linspace(0, N - 1, count, dtype=torch.float64).round().long().to(device)
        generator = torch.Generator().manual_seed(K)
        x = torch.randn(max(max(rows) for rows in ROWS.values()), K, generator=generator).to(device, dtype)
        if isinstance(weight, QuantizedWeight):
            part: QuantizedWeight | Tensor = replace(
                weight,
                codes=weight.codes[:, columns],
                scales=weight.scales[:, columns],
                offsets=weight.offsets[:, columns],
                zeros=None,
            )
            assert isinstance(part, QuantizedWeight)
            sizes = replace(part, scales=part.scales.abs(), offsets=part.offsets.abs()).dequantize()
        else:
            part = weight[columns]
            sizes = part.float()
        unit = reference_linear(x.float().square(), sizes.square()).sqrt()
        return cls(x, columns, reference_linear(x, part), unit.clamp_min(float(unit.mean()) / 64))


def kernel_error(kernel: LinearKernel, phase: Phase, reference: Reference) -> float:
    """The largest error of the kernel in the reference's units; infinite where an output is not finite."""
    worst = 0.0
    for rows in ROWS[phase]:
        y = kernel(reference.x[:rows])
        if not bool(torch.isfinite(y).all()):
            return math.inf
        error = (y[:, reference.columns].float() - reference.expected[:rows]).abs() / reference.unit[:rows]
        worst = max(worst, float(error.max()))
    return worst


def weight_fault(weight: QuantizedWeight | Tensor, dtype: torch.dtype) -> str | None:
    """Why a linear layer's weight cannot be right, None if nothing is seen. dtype: what it is computed in.

    Reads every code and scale once, in their stored types.
    """
    if isinstance(weight, Tensor):
        least, most = _extremes(weight)
        return f"every weight is {least:g}" if least == most else _range_fault(least, most, dtype)
    largest, shift = (max(map(abs, _extremes(values))) for values in (weight.scales, weight.offsets))
    for name, size in (("scales", largest), ("offsets", shift)):
        if not math.isfinite(size):
            return f"its {name} hold NaN or infinity"
    least, most = _extremes(weight.codes)
    if least == most:
        return f"every code is {least:.0f}"
    if largest == 0:
        return "every scale is 0"
    flat = weight.scales.flatten()
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].abs()
    positive = sample[sample > 0]
    typical = float(positive.median()) if positive.numel() else largest
    if largest > MAX_RATIO * typical:
        return f"its largest scale is {largest:.3g}, {largest / typical:.2g} times the median of {typical:.3g}"
    if shift > MAX_RATIO * (1 << weight.bits) * typical:
        return f"its largest offset is {shift:.3g}, and the median of its scales {typical:.3g}"
    return None


def tensor_fault(tensor: Tensor, dtype: torch.dtype) -> str | None:
    """Why a plain tensor (a norm, an embedding, a bias) cannot be right or be computed with in `dtype`."""
    return _range_fault(*_extremes(tensor), dtype)


def _range_fault(least: float, most: float, dtype: torch.dtype) -> str | None:
    if not (math.isfinite(least) and math.isfinite(most)):
        return "it holds NaN or infinity"
    limit = torch.finfo(dtype).max
    if max(-least, most) > limit:
        return f"it holds {max(-least, most):.3g}, beyond the {limit:.3g} of {str(dtype).removeprefix('torch.')}"
    return None


def _extremes(tensor: Tensor) -> tuple[float, float]:
    """Smallest and largest value in one pass, both NaN if one of the values is."""
    least, most = torch.aminmax(tensor)
    return float(least), float(most)
