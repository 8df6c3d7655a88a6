"""Modules whose quantisation differs from the rest of a checkpoint's, in lines for people. It knows no format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from appliance.quant.tensor_files import TensorFiles

NOT_QUANTIZED = "not quantised"
_MAX_LINES = 20


def describe_module(bits: int, rows: int, group_size: int, usual_group_size: int) -> str:
    """`4-bit group 128` of a module with K = `rows`.

    A single group is described as the usual size where that would make one group of K too.
    """
    if group_size >= rows and (usual_group_size == -1 or usual_group_size >= rows):
        group_size = usual_group_size
    return f"{bits}-bit {group_text(group_size)}"


def group_text(group_size: int) -> str:
    """`group 128`, or words for -1."""
    return "one group per column" if group_size == -1 else f"group {group_size}"


def plain_linears(files: TensorFiles, quantized: Iterable[str]) -> list[str]:
    """Modules with an unpacked matrix of weights, embeddings left out."""
    packed = set(quantized)
    modules = [name.removesuffix(".weight") for name in files if name.endswith(".weight")]
    return [m for m in modules if m not in packed and "embed" not in m and len(files.shape(f"{m}.weight")) == 2]


def exception_lines(settings: Mapping[str, str], usual: str) -> tuple[str, ...]:
    """Lines such as `lm_head not quantised` and `model.layers.0-3.* 8-bit group 32` for modules that are not `usual`.

    settings: what each module is. Layers that are alike share a line; at most 21 lines.
    """
    layers: dict[tuple[str, int | None], dict[str, str]] = {}
    for module, setting in settings.items():
        prefix, number, rest = _split(module)
        layers.setdefault((prefix, number), {})[rest] = setting
    grouped: dict[tuple[str, str, str], list[int | None]] = {}
    for (prefix, number), modules in layers.items():
        if number is not None and len(modules) > 1 and len(set(modules.values())) == 1:
            modules = {"*": next(iter(modules.values()))}
        for rest, setting in modules.items():
            if setting != usual:
                grouped.setdefault((prefix, rest, setting), []).append(number)
    lines = []
    for (prefix, rest, setting), numbers in grouped.items():
        every = sum(name == prefix for name, _ in layers)
        where = [_ranges([n for n in numbers if n is not None]) if len(numbers) < every else "*"]
        parts = [prefix, *(where if numbers[0] is not None else []), rest]
        lines.append(f"{'.'.join(part for part in parts if part)} {setting}")
    more = len(lines) - _MAX_LINES
    return (*lines[:_MAX_LINES], f"and {more} more kinds of modules") if more > 0 else tuple(lines)


def _split(module: str) -> tuple[str, int | None, str]:
    """`model.layers.3.mlp.up_proj` -> `model.layers`, 3, `mlp.up_proj`; (name, None, "") without a number."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal() and len(part) < 6:
            return ".".join(parts[:place]), int(part), ".".join(parts[place + 1 :])
    return module, None, ""


def _ranges(numbers: list[int]) -> str:
    """`0-3,7` of sorted numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
