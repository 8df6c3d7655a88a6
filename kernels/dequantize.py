"""Quantised linear layers on any device that dequantise at every call, for models whose dense copy does not fit."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.spec import AffineWeight, LinearSpec, Target


class DequantizeLinear:
    """y = x @ dequantise(W).T. Codes are kept two a byte up to 4 bits, else one a byte.

    On a CPU in bf16 a row's result does not depend on M.
    """

    name: ClassVar[str] = "dequantize"

    def __init__(self, weight: AffineWeight, dtype: torch.dtype) -> None:
        self.K, self.N = weight.codes.shape
        self.group_size = weight.group_size
        self.scales = weight.scales.t().contiguous()  # [N, G] fp32
        self.offsets = weight.offsets.t().contiguous()
        self.perm = weight.perm
        codes = weight.codes.t().contiguous()  # [N, K]: Linear's orientation
        self.is_packed = self.K % 2 == 0 and bool(codes.max() < 16)
        self.codes = codes[:, 0::2] | (codes[:, 1::2] << 4) if self.is_packed else codes

    @property
    def nbytes(self) -> int:
        perm_bytes = 0 if self.perm is None else self.perm.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes + perm_bytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K], rows of K in the packed order."""
        codes = (
            torch.stack([self.codes & 15, self.codes >> 4], -1).view(self.N, self.K) if self.is_packed else self.codes
        )
        scales, offsets = self.scales, self.offsets
        groups = scales.shape[1]
        if groups * self.group_size == self.K:
            grouped = codes.view(self.N, groups, self.group_size).float()
            return grouped.mul_(scales.unsqueeze(-1)).add_(offsets.unsqueeze(-1)).view(self.N, self.K).to(dtype)
        scales = scales.repeat_interleave(self.group_size, 1)[:, : self.K]
        offsets = offsets.repeat_interleave(self.group_size, 1)[:, : self.K]
        return codes.float().mul_(scales).add_(offsets).to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self.perm is not None:
            x = x[:, self.perm]
        weight = self.dense(x.dtype)
        if x.shape[0] == 1 and x.device.type == "cpu":
            # As in OneDnnLinear: a single row gets company.
            return F.linear(torch.cat([x, x]), weight)[:1]
        return F.linear(x, weight)


def refuse(spec: LinearSpec, target: Target) -> str | None:
    if not spec.is_quantized:
        return "needs a quantised weight, found a dense one"
    return None


def pack(weight: AffineWeight | Tensor, dtype: torch.dtype) -> DequantizeLinear:
    assert not isinstance(weight, Tensor), "refuse() lets no dense weight through"
    return DequantizeLinear(weight, dtype)
