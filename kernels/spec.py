"""What a linear kernel is asked to run, and on what: the vocabulary of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Phase(StrEnum):
    """The kind of a row of activations. A row's kernel depends on its phase alone, never on its neighbours."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Shape and storage of one linear layer: y[M, N] = x[M, K] @ W[K, N]."""

    K: int
    N: int
    bits: int
    """2 to 8 for quantised codes, 16 or 32 for a dense weight."""
    group_size: int = 0
    """Rows of K that share a scale; 0 for a dense weight."""
    has_perm: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.group_size > 0

    def __str__(self) -> str:
        storage = f"{self.bits}-bit group {self.group_size}" if self.is_quantized else f"{self.bits}-bit dense"
        return f"K={self.K} N={self.N} {storage}{' act-order' if self.has_perm else ''}"


@dataclass(frozen=True, slots=True)
class Target:
    """Where layers run. keep_dense allows a dense copy of quantised weights beside the packed one."""

    device: str
    """cpu or cuda: whose kernels."""
    dtype: torch.dtype
    keep_dense: bool
    location: torch.device = CPU
    """Where weights live. Triton's interpreter runs cuda's kernels on tensors of the CPU."""


class AffineWeight(Protocol):
    """A quantised weight as `appliance.quant.weight.QuantizedWeight` holds it, by its fields."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...
    @property
    def group_size(self) -> int: ...
    @property
    def perm(self) -> Tensor | None: ...
    def dequantize(self, dtype: torch.dtype = ...) -> Tensor: ...


class LinearKernel(Protocol):
    """A packed layer ready to run. `kernel(x)` takes [M, K] and returns [M, N] in x's dtype, without the bias."""

    name: ClassVar[str]

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One line of the registry."""

    name: str
    phases: frozenset[Phase]
    refuse: Callable[[LinearSpec, Target], str | None]
    """Why the kernel cannot run this layer there; None when it can."""
    pack: Callable[[AffineWeight | Tensor, torch.dtype], LinearKernel]
    """Builds the kernel's own layout from a canonical weight, or a dense one [N, K], on the device it is on."""
