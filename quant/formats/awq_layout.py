"""What a layout of AWQ's words offers to their reader, and the checks that all layouts share. It knows no bits.

In every layout a weight is W[k, n] = scale * code + offset at 4 bits, with a scale and an offset per group and output.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.quant.formats.source import check_finite
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

BITS = 4
# Zero point of modules that store none.
MIDDLE = 8
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Extent(NamedTuple):
    """Inputs K of a module, the groups that they fall into, and outputs N."""

    inputs: int
    groups: int
    outputs: int


class AwqLayout(Protocol):
    """One way to lay out a module's codes, scales and zero points."""

    @property
    def name(self) -> str:
        """AutoAWQ's word for it (its `version`)."""

    @property
    def zeros(self) -> str:
        """Suffix of the tensor of zero points, which may be absent."""

    def matches(self, files: TensorFiles, module: str) -> bool:
        """Whether the module's qweight and scales, both matrices, are of this layout by dtype and shape."""

    def extent(self, files: TensorFiles, module: str) -> Extent:
        """Raises CheckpointError naming file, found and expected for a tensor of another dtype or shape."""

    def is_symmetric(self, files: TensorFiles, module: str, groups: int) -> bool:
        """Whether the zero points of all groups are 8."""

    def read(self, files: TensorFiles, module: str, group_size: int) -> QuantizedWeight:
        """Raises CheckpointError for scales that are not finite."""


def check_tensor(files: TensorFiles, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    """Raises CheckpointError naming the tensor, its file, and what was found and expected."""
    found = files.dtype(name), files.shape(name)
    if found[0] not in dtypes or found[1] != shape:
        wanted = "floats" if len(dtypes) > 1 else str(dtypes[0])
        raise CheckpointError(
            f"{name} in {files.file(name).name} is {found[0]} {list(found[1])}, {wanted} {list(shape)} was expected "
            "beside the module's other tensors: the file is damaged, download it again"
        )


def padded_groups(scales: Tensor) -> int:
    """Groups of `scales` [G or more, N]: rows up to the last that is not all zero.

    The rest is the kernels' padding: quantisers clamp scales above zero, so no group has none.
    """
    used = scales.any(1).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def read_scales(files: TensorFiles, name: str) -> Tensor:
    return check_finite(files.tensor(name), name)
