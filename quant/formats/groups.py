"""How many rows of K share a scale, from shapes and from what is declared. Shared by GPTQ and AWQ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from appliance.errors import CheckpointError
from appliance.quant.declared import DeclaredQuantization


def solve_group_size(module: str, rows: int, groups: int, declared: DeclaredQuantization | None) -> int:
    """The group size of a module with K = `rows` and scales for `groups` groups; K itself for a single group.

    K need not be a multiple: the last group may be short. Raises CheckpointError naming the module and both values when
    the declared size does not fit; without a declaration a power of two is preferred (at most one fits).
    """
    if rows < 1:
        raise CheckpointError(f"{module} has no inputs, at least one was expected: download the model again")
    if groups < 1:
        raise CheckpointError(
            f"the scales of {module} have no rows, one per group was expected: download the model again"
        )
    declared = declared.for_module(module) if declared is not None else None
    size = declared.group_size if declared is not None else None
    if size is not None and declared is not None:
        size = rows if size == -1 else min(size, rows)
        expected = -(-rows // size)
        if expected == groups:
            return size
        if not declared.overrides:
            raise CheckpointError(
                f"{declared.file} says group_size {declared.group_size}, which makes {expected} groups of the {rows} "
                f"inputs of {module}, but its scales have {groups} rows: correct the configuration"
            )
    if groups == 1:
        return rows
    power = 1
    while power < rows:
        if -(-rows // power) == groups:
            return power
        power *= 2
    if rows % groups == 0:
        return rows // groups
    raise CheckpointError(
        f"the scales of {module} have {groups} rows, no group size divides its {rows} inputs into as many: "
        "the file is damaged, download it again"
    )


def reported_group_size(modules: Iterable[tuple[int, int]]) -> int:
    """Of (K, group size) pairs: -1 when every module has one group, else the most common size."""
    pairs = list(modules)
    if all(rows == size for rows, size in pairs):
        return -1
    return Counter(size for _, size in pairs).most_common(1)[0][0]
