"""What every format's reader offers to a Checkpoint, and how a weight with integer zero points is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.kernels.spec import LinearSpec
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight


class WeightSource(Protocol):
    """One format's reader. Names are Hugging Face's; nothing is kept of what was read."""

    @property
    def report(self) -> FormatReport: ...

    def plain_names(self) -> Iterable[str]:
        """Names of the tensors that are stored unquantised."""

    def quantized_modules(self) -> Iterable[str]:
        """Names of the modules whose weight is stored quantised."""

    def spec(self, module: str) -> LinearSpec:
        """Shape and storage of one of quantized_modules(), without reading it."""

    def tensor(self, name: str) -> Tensor:
        """One of plain_names()."""

    def quantized(self, module: str) -> QuantizedWeight:
        """One of quantized_modules()."""

    def close(self) -> None: ...


def from_zeros(
    codes: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, group_size: int, perm: Tensor | None = None
) -> QuantizedWeight:
    """The canonical weight of `scales * (codes - zeros)`: exact in float32 where the scales are fp16 or bf16."""
    scales = scales.float().contiguous()
    zeros = zeros.to(torch.int32)
    return QuantizedWeight(
        codes=codes, scales=scales, offsets=-scales * zeros, bits=bits, group_size=group_size, zeros=zeros, perm=perm
    )


def check_finite(tensor: Tensor, name: str, what: str = "scales") -> Tensor:
    """`tensor` as it is. Raises CheckpointError naming it when it is not of floats or holds NaN or infinity."""
    if not tensor.is_floating_point():
        raise CheckpointError(f"tensor {name} is {tensor.dtype}, {what} of floats are needed: download it again")
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"tensor {name} holds NaN or infinite {what}, finite ones are needed: download it again")
    return tensor


def shapes_of(files: TensorFiles, module: str, suffixes: tuple[str, ...]) -> str:
    """For evidence and errors: `model.layers.0.mlp.up_proj (qweight [16, 64], scales [4, 64])`."""
    found = [f"{suffix[1:]} {list(files.shape(module + suffix))}" for suffix in suffixes if module + suffix in files]
    return f"{module} ({', '.join(found)})"
