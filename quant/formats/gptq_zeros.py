"""The zero points of GPTQ files: which of two encodings, and what of them was lost. It knows words, not weights.

Version 2 (`gptq_v2`) stores the zero points as they are, version 1 stores them less one. Where whole codes fill a word
(2, 4, 8 bits) version 1 is the word minus one in every field: adding that constant to the whole word, modulo its size,
is exact for symmetric files and undoes GPTQModel's own subtraction, whose borrows cross fields. 3-bit fields straddle
words and are counted up each for itself, modulo 8. AutoGPTQ (qlinear_cuda.py, pack) instead writes zero - 1 = -1 as 32
set bits shifted into place, which destroys the zero points in the higher fields of the word; these cannot be restored
and are reported.

The words themselves tell the versions apart. A symmetric module has the middle code everywhere, which is another word
in each version. The zero points of asymmetric modules lie around the middle of the codes (within 0.01 of it, on the
average of a model), those of version 1 one below it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.gptq_module import GptqModule
from appliance.quant.packing import unpack_words
from appliance.quant.tensor_files import TensorFiles

# At 2, 4 and 8 bits gptq_p has version 2's words: GPTQModel utils/planar_packing.py.
_VERSIONS = {"gptq": 1, "gptq_v2": 2, "gptq_p": 2}
# The average of asymmetric zero points decides where it is over so many, so near to one version's place, and few
# fields are full: a full one may be a -1 or have been written over.
_ENOUGH_ZERO_POINTS = 1024
_NEAR = 0.25
_FEW = 0.01
# At 8 bits one code less is too small a part of the range to tell.
_MAX_AVERAGED_BITS = 4


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """How the zero points of one checkpoint are encoded."""

    version: int
    symmetric: bool
    evidence: str
    warnings: tuple[str, ...]


def decode_zeros(words: Tensor, bits: int, version: int, columns: int) -> Tensor:
    """uint8 zero points [G, columns] of integer words [G, ceil(columns * bits / width)]."""
    width = 8 * words.element_size()
    whole = width % bits == 0
    if version == 1 and whole:
        words = words + sum(1 << shift for shift in range(0, width, bits))  # wraps around
    zeros = unpack_words(words, bits, 1)[:, :columns]
    return (zeros + 1) & ((1 << bits) - 1) if version == 1 and not whole else zeros


def study_zero_points(
    files: TensorFiles, modules: Mapping[str, GptqModule], declared: DeclaredQuantization | None
) -> ZeroPoints:
    """Reads every module's qzeros once. The words decide between versions where they can, else the declared format.

    Raises UnsupportedModelError naming a declared format that is not GPTQ's, CheckpointError when modules contradict
    each other.
    """
    declared_version = _declared_version(declared)
    if not files.has_data:
        symmetric = declared is not None and declared.symmetric is True
        evidence = f"qzeros were not read; the configuration implies version {declared_version}"
        return ZeroPoints(declared_version, symmetric, evidence, ())
    survey = _survey(files, modules)
    version, seen = _decide(survey, declared_version)
    warnings = []
    if version != declared_version:
        said = "the configuration implies" if declared is not None else "files without a configuration have"
        warnings.append(
            f"{said} zero points of version {declared_version}, but {seen}, which is version {version}: "
            f"read as version {version}"
        )
    if version == 1 and survey.lost and "gptqmodel" not in (declared.writer if declared is not None else ""):
        warnings.append(
            f"{sum(survey.lost.values())} words of zero points (the first in {next(iter(survey.lost))}.qzeros) hold a "
            "0 that AutoGPTQ wrote over its neighbours: these columns decode wrongly, quantise again with symmetric "
            "zeros or gptq_v2"
        )
    if declared is not None:
        unexpected = [module for module in survey.asymmetric if declared.for_module(module).symmetric]
        if unexpected:
            warnings.append(
                f"{declared.file} says sym true, but the zero points of {len(unexpected)} modules differ (the first in "
                f"{unexpected[0]}.qzeros): they are used as they are"
            )
    asymmetric = len(survey.asymmetric)
    kind = f"{asymmetric} modules are asymmetric" if asymmetric else "every module is symmetric"
    return ZeroPoints(version, not asymmetric, f"{kind}; {seen}; read as version {version}", tuple(warnings))


@dataclass(slots=True)
class _Survey:
    """symmetric: version -> the first module that shows it. lost: words written over, by module. Of the fields of
    asymmetric modules: how many, their distances from the middle code in all, how many have every bit set.
    """

    symmetric: dict[int, str] = field(default_factory=dict)
    asymmetric: list[str] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    count: int = 0
    distance: float = 0.0
    full: int = 0


def _survey(files: TensorFiles, modules: Mapping[str, GptqModule]) -> _Survey:
    survey = _Survey()
    for module, spec in modules.items():
        words = files.tensor(f"{module}.qzeros")
        fields = unpack_words(words, spec.bits, 1)[:, : spec.columns]
        middle, highest = 1 << (spec.bits - 1), (1 << spec.bits) - 1
        first = int(fields[0, 0])
        if first in (middle - 1, middle) and bool((fields == first).all()):
            survey.symmetric.setdefault(1 if first < middle else 2, module)
            continue
        survey.asymmetric.append(module)
        if lost := _lost_words(words, spec.bits):
            survey.lost[module] = lost
        if spec.bits <= _MAX_AVERAGED_BITS:
            survey.count += fields.numel()
            survey.distance += int(fields.sum(dtype=torch.int64)) - fields.numel() * highest / 2
            survey.full += int((fields == highest).sum())
    return survey


def _decide(survey: _Survey, declared_version: int) -> tuple[int, str]:
    """The version, and what was seen of it."""
    if len(survey.symmetric) > 1:
        raise CheckpointError(
            f"{survey.symmetric[1]}.qzeros holds symmetric zero points of version 1, {survey.symmetric[2]}.qzeros "
            "those of version 2, one version was expected: quantise the model again"
        )
    for version, module in survey.symmetric.items():
        return version, f"every field of {module}.qzeros holds the symmetric zero point of version {version}"
    if survey.count >= _ENOUGH_ZERO_POINTS and survey.full < _FEW * survey.count:
        average = survey.distance / survey.count
        for version, place in ((1, -1), (2, 0)):
            if abs(average - place) < _NEAR:
                return version, f"the fields of qzeros are {average:+.2f} from the middle code on average"
    return declared_version, "the zero points do not tell their version"


def _declared_version(declared: DeclaredQuantization | None) -> int:
    if declared is None or declared.layout is None:
        return 1
    if declared.layout not in _VERSIONS:
        raise UnsupportedModelError(
            f"{declared.file} says GPTQ format {declared.layout!r}, use gptq or gptq_v2, the supported ones"
        )
    return _VERSIONS[declared.layout]


def _lost_words(words: Tensor, bits: int) -> int:
    """How many words look as if a -1 was written over a field: set in the highest field that has bits above it, and
    in all of those. A zero point of 0 followed by genuine 1s looks the same, but no quantiser yields many of these.
    """
    width = 8 * words.element_size()
    cycle = bits // math.gcd(bits, width)
    found = 0
    for place in range(cycle):  # of the word among those after which fields begin anew
        shifts = range(-width * place % bits, width - bits, bits)
        if shifts:
            ones = (1 << (width - shifts[-1])) - 1
            found += int((((words[:, place::cycle].to(torch.int64) >> shifts[-1]) & ones) == ones).sum())
    return found
