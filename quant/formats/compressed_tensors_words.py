"""The words of a pack-quantized module: where codes and zero points lie (the layout: compressed_tensors.py).

It knows shapes and bits, no configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.quant.packing import unpack_words
from appliance.quant.tensor_files import TensorFiles


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """K = rows, N = columns, G = groups. dense: codes lie without gaps and may straddle words."""

    module: str
    rows: int
    columns: int
    groups: int
    bits: int
    dense: bool

    @property
    def middle(self) -> int:
        """The unsigned code of a signed 0."""
        return 1 << (self.bits - 1)


def words_for(count: int, bits: int, dense: bool) -> int:
    """int32 words that hold `count` codes."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def read_codes(files: TensorFiles, layout: PackedLayout) -> Tensor:
    """uint8 codes [N, K]. Raises CheckpointError where bits are set past them: then the width is another."""
    name = f"{layout.module}.weight_packed"
    return _unpack(files, name, files.tensor(name), layout, layout.rows)


def read_zeros(files: TensorFiles, layout: PackedLayout) -> Tensor:
    """Zero points [N, G] as unsigned codes, uint8 or int32.

    Raises CheckpointError naming the tensor for another shape or for values that the width does not have.
    """
    name = f"{layout.module}.weight_zero_point"
    shape = (words_for(layout.columns, layout.bits, layout.dense), layout.groups)
    found = (files.dtype(name), files.shape(name))
    if found == (torch.int32, shape):
        return _unpack(files, name, files.tensor(name).t(), layout, layout.columns).t()
    if found != (torch.int8, (layout.columns, layout.groups)):
        raise CheckpointError(
            f"{name} is {found[0]} {list(found[1])}, int32 {list(shape)} was expected from weight_packed and "
            f"weight_scale: {files.file(name).name} is damaged, download it again"
        )
    zeros = files.tensor(name).to(torch.int32) + layout.middle
    if not bool(((zeros >= 0) & (zeros < 1 << layout.bits)).all()):
        raise CheckpointError(
            f"{name} holds {int(zeros.max()) - layout.middle}, zero points of {layout.bits} bits were expected: "
            f"{files.file(name).name} is damaged, download it again"
        )
    return zeros


def _unpack(files: TensorFiles, name: str, lines: Tensor, layout: PackedLayout, count: int) -> Tensor:
    """The `count` codes of each line of words [L, words], as uint8 [L, count]."""
    bits = layout.bits
    if layout.dense:
        codes = unpack_words(lines, bits, 1)
    else:  # every word is a line of its own
        codes = unpack_words(lines.reshape(-1, 1), bits, 1).reshape(lines.shape[0], -1)
    if bool(codes[:, count:].any()) or (not layout.dense and bool((lines >> bits * (32 // bits)).any())):
        raise CheckpointError(
            f"{name} has bits set after its {count} codes of {bits} bits, zeros were expected: "
            f"{files.file(name).name} is damaged or of another width, download it again"
        )
    return codes[:, :count]
