"""What every linear kernel must compute, in plain float32."""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.kernels.spec import AffineWeight


def linear(x: Tensor, weight: AffineWeight | Tensor) -> Tensor:
    """y [M, N] float32 of x [M, K] and a canonical weight, or a dense one [N, K]."""
    dense = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    return x.float() @ dense.float().t()
