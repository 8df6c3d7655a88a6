"""One module of a GPTQ file: its bits, words, groups and row order, found in its tensors and checked against what is
declared for it. It reads g_idx, no weights. The layout is documented in gptq.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.groups import solve_group_size
from appliance.quant.formats.source import shapes_of
from appliance.quant.tensor_files import TensorFiles

PACKED = (".qweight", ".qzeros", ".scales", ".g_idx")
_BITS = (2, 3, 4, 8)
# Every width has shapes of its own, so that one that is not served can be named.
_KNOWN_BITS = (2, 3, 4, 5, 6, 7, 8)
_WORDS = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}


@dataclass(frozen=True, slots=True)
class GptqModule:
    """rows, columns: K and N. permuted: the rows' groups are not in natural order (act-order)."""

    rows: int
    columns: int
    bits: int
    group_size: int
    permuted: bool


def inspect_module(files: TensorFiles, module: str, declared: DeclaredQuantization | None) -> GptqModule:
    """Finds out what `module` is; declared: as it applies to this module.

    Raises CheckpointError for shapes that contradict each other or the declaration, UnsupportedModelError for words
    and bits that are not served.
    """
    width = _word_bits(files, module, declared)
    words, zeros, scales = (files.shape(module + suffix) for suffix in (".qweight", ".qzeros", ".scales"))
    order = files.shape(f"{module}.g_idx") if f"{module}.g_idx" in files else None
    candidates: list[int] = []
    if len(words) == len(zeros) == len(scales) == 2 and 0 not in words and (order is None or len(order) == 1):
        candidates = [
            bits
            for bits in _KNOWN_BITS
            if scales == (zeros[0], words[1])
            and zeros[1] == -(-words[1] * bits // width)
            and (order is None or words[0] in _lengths(order[0], bits, width))
        ]
    if not candidates:
        raise CheckpointError(
            f"the shapes of {shapes_of(files, module, PACKED)} do not belong together, GPTQ needs qweight "
            f"[K*bits/{width}, N], qzeros [G, N*bits/{width}], scales [G, N] and g_idx [K]: "
            f"{files.file(module + '.qweight').name} is damaged, download it again"
        )
    bits = _solve_bits(module, candidates, declared)
    planar = bits == 3 and declared is not None and declared.layout == "gptq_p"
    if bits not in _BITS or planar:
        raise UnsupportedModelError(
            f"{module} is {bits}-bit GPTQ{' in planes (gptq_p)' if planar else ''}, "
            f"{', '.join(map(str, _BITS))} bits{' in gptq and gptq_v2' if planar else ''} are supported: "
            "use a checkpoint of one of these"
        )
    rows = order[0] if order is not None else words[0] * width // bits
    group_size = solve_group_size(module, rows, scales[0], declared)
    permuted = _is_permuted(files, module, rows, scales[0], group_size, declared)
    return GptqModule(rows, words[1], bits, group_size, permuted)


def _word_bits(files: TensorFiles, module: str, declared: DeclaredQuantization | None) -> int:
    dtype = files.dtype(f"{module}.qweight")
    for suffix in (".qweight", ".qzeros"):
        if files.dtype(module + suffix) != dtype or dtype not in _WORDS:
            raise UnsupportedModelError(
                f"{module} has qweight of {dtype} and {suffix[1:]} of {files.dtype(module + suffix)}, GPTQ words of "
                "one signed integer dtype are supported: use a checkpoint with these"
            )
    width = _WORDS[dtype]
    if declared is not None and declared.word_bits not in (None, width):
        raise CheckpointError(
            f"{declared.file} says pack_dtype int{declared.word_bits}, but {module}.qweight has words of int{width}: "
            "correct the configuration"
        )
    return width


def _lengths(rows: int, bits: int, width: int) -> tuple[int, int]:
    """Words that hold `rows` codes: as few as can be, or whole cycles of codes that straddle words."""
    fewest = -(-rows * bits // width)
    return fewest, fewest if width % bits == 0 else -(-rows // width) * bits


def _solve_bits(module: str, candidates: list[int], declared: DeclaredQuantization | None) -> int:
    if declared is not None and declared.bits is not None:
        if declared.bits in candidates:
            return declared.bits
        if not declared.overrides:
            raise CheckpointError(
                f"{declared.file} says {declared.bits} bits for {module}, but the shapes of its qweight and qzeros are "
                f"those of {candidates[-1]} bits: correct the configuration"
            )
    return 4 if 4 in candidates else candidates[-1]


def _is_permuted(
    files: TensorFiles, module: str, rows: int, groups: int, group_size: int, declared: DeclaredQuantization | None
) -> bool:
    """Whether the rows are grouped by a permutation: decided by g_idx, never by the flag if there is data."""
    if not files.has_data:
        return declared is not None and declared.act_order is True and not declared.static_groups and groups > 1
    natural = torch.arange(rows) // group_size
    order = files.tensor(f"{module}.g_idx").to(torch.int64) if f"{module}.g_idx" in files else None
    if order is not None and torch.equal(order, natural):
        return False
    if order is None or (groups > 1 and not bool(order.any())):  # writers leave g_idx out or all zero
        if groups > 1 and declared is not None and declared.act_order and not declared.static_groups:
            found = "is missing" if order is None else "is all zero"
            raise CheckpointError(
                f"{declared.file} says desc_act true, but {module}.g_idx, which holds the order, {found}: "
                "correct the configuration or download the model again"
            )
        return False
    if not torch.equal(order.sort().values, natural):
        raise CheckpointError(
            f"{module}.g_idx names groups {int(order.min())} to {int(order.max())} in uneven numbers, {rows} rows "
            f"in {groups} groups of {group_size} were expected: the model is damaged, download it again"
        )
    return True
