"""Dense linear layers on any device: oneDNN or MKL on a CPU, cuBLAS on a card."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.spec import AffineWeight, LinearSpec, Target


class DenseLinear:
    """y = x @ W.T with W [N, K] in the compute dtype. Moves 2*K*N bytes a call in 16 bits."""

    name: ClassVar[str] = "dense"

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def refuse(spec: LinearSpec, target: Target) -> str | None:
    if spec.is_quantized and not target.keep_dense:
        return "needs a dense copy, for which the memory plan has no room"
    return None


def pack(weight: AffineWeight | Tensor, dtype: torch.dtype) -> DenseLinear:
    if isinstance(weight, Tensor):
        return DenseLinear(weight.to(dtype).contiguous())
    return DenseLinear(weight.dequantize(dtype))
