"""The canonical weight: what every checkpoint format is read into.

    W[k, n] = scales[g(k), n] * codes[k, n] + offsets[g(k), n]        g(k) = k // group_size

GPTQ, AWQ, compressed-tensors and GGUF are all instances. With fp16 or bf16 scales the products are exact in fp32, so
this form equals the packers' own `s * (q - z)` bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One quantised linear layer, K inputs and N outputs.

    codes: [K, N] uint8, unsigned codes below 2**bits, rows sorted by group.
    scales, offsets: [G, N] float32, G = ceil(K / group_size).
    zeros: [G, N] int32 where the format has integer zero points (offsets == -scales * zeros), else None.
    perm: [K] int64 or None: row i of `codes` multiplies input feature perm[i] (act-order). None is the identity.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    bits: int
    group_size: int
    zeros: Tensor | None = None
    perm: Tensor | None = None

    @property
    def K(self) -> int:
        return self.codes.shape[0]

    @property
    def N(self) -> int:
        return self.codes.shape[1]

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same weight with its tensors on `device`."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            offsets=self.offsets.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            perm=None if self.perm is None else self.perm.to(device),
        )

    def __mul__(self, factor: float) -> QuantizedWeight:
        """The layer whose outputs are `factor` times this one's: the same codes under other scales."""
        return replace(self, scales=self.scales * factor, offsets=self.offsets * factor)

    def select_outputs(self, index: Tensor) -> QuantizedWeight:
        """The layer of the outputs `index` [N'] alone, in that order."""
        return replace(
            self,
            codes=self.codes[:, index],
            scales=self.scales[:, index],
            offsets=self.offsets[:, index],
            zeros=None if self.zeros is None else self.zeros[:, index],
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight [N, K] in nn.Linear's orientation and natural input order, computed in float32."""
        groups = self.scales.shape[0]
        if groups * self.group_size == self.K:  # broadcast instead of repeating the scales
            codes = self.codes.view(groups, self.group_size, self.N).float()
            dense = codes.mul_(self.scales.unsqueeze(1)).add_(self.offsets.unsqueeze(1)).view(self.K, self.N)
        else:
            scales = self.scales.repeat_interleave(self.group_size, 0)[: self.K]
            offsets = self.offsets.repeat_interleave(self.group_size, 0)[: self.K]
            dense = self.codes.float().mul_(scales).add_(offsets)
        if self.perm is not None:
            natural = torch.empty_like(dense)
            natural[self.perm] = dense
            dense = natural
        return dense.t().contiguous().to(dtype)


def concatenate(weights: list[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the outputs of all, in order (q|k|v, gate|up); None where their specs or permutations differ."""
    first = weights[0]
    for other in weights[1:]:
        same_perm = (first.perm is None and other.perm is None) or (
            first.perm is not None and other.perm is not None and torch.equal(first.perm, other.perm)
        )
        if (other.bits, other.group_size, other.K) != (first.bits, first.group_size, first.K) or not same_perm:
            return None
    zeros = [w.zeros for w in weights if w.zeros is not None]
    return QuantizedWeight(
        codes=torch.cat([w.codes for w in weights], 1),
        scales=torch.cat([w.scales for w in weights], 1),
        offsets=torch.cat([w.offsets for w in weights], 1),
        bits=first.bits,
        group_size=first.group_size,
        zeros=torch.cat(zeros, 1) if len(zeros) == len(weights) else None,
        perm=first.perm,
    )
