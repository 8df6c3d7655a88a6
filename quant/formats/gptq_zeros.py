"""The zero points of GPTQ files: which of two encodings, and what of them was lost. It knows words, not weights.

Version 2 (`gptq_v2`) stores the zero points as they are. Version 1 stores every word minus 0x11111111: adding that
constant to the whole word, modulo 2**32, is exact for symmetric files and undoes GPTQModel's own subtraction, whose
borrows cross nibbles. AutoGPTQ (qlinear_cuda.py, pack) instead writes zero - 1 = -1 as 32 set bits shifted into place,
which destroys the zero points in the higher nibbles of the word; these cannot be restored and are reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.packing import as_int32, unpack_words
from appliance.quant.tensor_files import TensorFiles

_ONES = 0x11111111
# The word of eight zero points of 8, as int32, in each version.
_SYMMETRIC = {0x77777777: 1, 0x88888888 - (1 << 32): 2}
# At 4 bits gptq_p has version 2's words: GPTQModel utils/planar_packing.py.
_VERSIONS = {"gptq": 1, "gptq_v2": 2, "gptq_p": 2}


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """How the zero points of one checkpoint are encoded."""

    version: int
    symmetric: bool
    evidence: str
    warnings: tuple[str, ...]


def decode_zeros(words: Tensor, version: int, columns: int) -> Tensor:
    """uint8 zero points [G, columns] of int32 words [G, ceil(columns / 8)]."""
    if version == 1:
        words = as_int32(words.to(torch.int64) + _ONES)
    return unpack_words(words, 4, 1)[:, :columns]


def study_zero_points(files: TensorFiles, modules: list[str], declared: DeclaredQuantization | None) -> ZeroPoints:
    """Reads every module's qzeros once. The words decide between versions where they can, else the declared format.

    Raises UnsupportedModelError naming a declared format that is not GPTQ's.
    """
    version = 1
    if declared is not None and declared.layout is not None:
        if declared.layout not in _VERSIONS:
            raise UnsupportedModelError(
                f"{declared.file} says GPTQ format {declared.layout!r}, use gptq or gptq_v2, the supported ones"
            )
        version = _VERSIONS[declared.layout]
    constant = int(files.tensor(f"{modules[0]}.qzeros").flatten()[0])
    symmetric = constant in _SYMMETRIC
    suspects: dict[str, int] = {}
    for module in modules:
        words = files.tensor(f"{module}.qzeros")
        if symmetric and bool((words == constant).all()):
            continue
        symmetric = False
        # A zero point of 0 followed by genuine 1s looks the same, but no quantiser yields those in a row.
        lost = int(((words >> 24) & 0xFF == 0xFF).sum())
        if lost:
            suspects[module] = lost
    if symmetric:
        implied = _SYMMETRIC[constant]
        evidence = f"every qzeros word is 0x{constant & 0xFFFFFFFF:08x}: symmetric, version {implied}"
        if implied == version:
            return ZeroPoints(version, True, evidence, ())
        warning = (
            f"the configuration implies zero points of version {version}, but every word is the symmetric one of "
            f"version {implied}: read as version {implied}"
        )
        return ZeroPoints(implied, True, evidence, (warning,))
    warnings: tuple[str, ...] = ()
    if version == 1 and suspects and "gptqmodel" not in (declared.writer if declared is not None else ""):
        warnings = (
            f"{sum(suspects.values())} words of zero points (the first in {next(iter(suspects))}.qzeros) hold a 0 that "
            "AutoGPTQ wrote over its neighbours: these columns decode wrongly, quantise again with symmetric zeros or "
            "gptq_v2",
        )
    return ZeroPoints(version, False, f"zero points differ: asymmetric, read as version {version}", warnings)
