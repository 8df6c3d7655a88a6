"""GPTQ in Marlin's order, 4-bit symmetric: what AutoGPTQ saved with `is_marlin_format`.

Layout (AutoGPTQ qlinear_marlin.py, IST-DASLab/marlin), K inputs (a multiple of 128), N outputs (of 256):
    B [K/16, 2N] int32: codes in the order in which a warp's tensor cores take them. Row r holds the tiles of 16 inputs
        from 16r on, left to right, four of 16 outputs in every 128 words. Word 4*lane + tile of these, lane < 32, holds
        of that tile in nibble n, with e = (0, 2, 4, 6, 1, 3, 5, 7)[n]:
            input 2 * (lane % 4) + (0, 1, 8, 9)[e % 4], output lane // 4 + 8 * (e // 4)
    s [G, N] fp16: with groups of 128 every 64 columns as an 8 x 8 matrix transposed; with a single group every 32
        columns as a 4 x 4 matrix of pairs transposed.
    W[k, n] = scale[k // group_size, n] * (code[k, n] - 8). There are no zero points and no act-order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.kernels.spec import LinearSpec
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.exceptions import NOT_QUANTIZED, exception_lines, group_text, plain_linears
from appliance.quant.formats.groups import reported_group_size, solve_group_size
from appliance.quant.formats.source import check_finite, from_zeros, shapes_of
from appliance.quant.packing import unpack_words
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

_BITS = 4
_ZERO = 8
_TILE = 16
_PACKED = (".B", ".s")
_METHODS = (None, "gptq", "marlin")


class MarlinSource:
    """Reads Marlin modules. Raises CheckpointError for shapes that contradict each other or the declaration."""

    def __init__(self, files: TensorFiles, modules: list[str], declared: DeclaredQuantization | None) -> None:
        if declared is not None and (declared.bits not in (None, _BITS) or declared.method not in _METHODS):
            raise CheckpointError(
                f"{declared.file} says {declared.method or 'no method'}, {declared.bits} bits, but {modules[0]}.B is "
                "in Marlin's layout, which is GPTQ at 4 bits: correct the configuration"
            )
        self._files = files
        self._group_sizes = {module: _group_size(files, module, declared) for module in modules}
        group_size = reported_group_size((_rows(files, module), size) for module, size in self._group_sizes.items())
        usual = f"{_BITS}-bit {group_text(group_size)}"
        settings = {module: usual for module in modules}
        settings |= dict.fromkeys(plain_linears(files, modules), NOT_QUANTIZED)
        self.report = FormatReport(
            format="gptq",
            variant="marlin",
            bits=_BITS,
            group_size=group_size,
            symmetric=True,
            act_order=False,
            exceptions=exception_lines(settings, usual),
            evidence=(f"{len(modules)} modules are in Marlin's layout: {shapes_of(files, modules[0], _PACKED)}",),
        )

    def plain_names(self) -> list[str]:
        packed = {module + suffix for module in self._group_sizes for suffix in (*_PACKED, ".workspace", ".weight")}
        return [name for name in self._files if name not in packed]

    def quantized_modules(self) -> list[str]:
        return list(self._group_sizes)

    def spec(self, module: str) -> LinearSpec:
        rows, columns = _rows(self._files, module), self._files.shape(f"{module}.B")[1] // 2
        return LinearSpec(rows, columns, _BITS, self._group_sizes[module])

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        codes = marlin_codes(self._files.tensor(f"{module}.B"))
        scales = marlin_scales(check_finite(self._files.tensor(f"{module}.s"), f"{module}.s"))
        zeros = torch.full(scales.shape, _ZERO, dtype=torch.uint8)
        return from_zeros(codes, scales, zeros, bits=_BITS, group_size=self._group_sizes[module])

    def close(self) -> None:
        self._files.close()


def marlin_codes(words: Tensor) -> Tensor:
    """uint8 codes [K, N] in natural order of int32 `words` [K/16, 2N]."""
    lane = torch.arange(32).view(32, 1, 1)
    tile = torch.arange(4).view(1, 4, 1)
    element = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]).view(1, 1, 8)
    row = 2 * (lane % 4) + torch.tensor([0, 1, 8, 9])[element % 4]
    column = lane // 4 + 8 * (element // 4)
    place = (_TILE * _TILE * tile + _TILE * row + column).flatten()
    stored = unpack_words(words, _BITS, 1).view(-1, place.numel())
    codes = torch.empty_like(stored)
    codes[:, place] = stored
    columns = words.shape[1] // 2
    tiles = codes.view(words.shape[0], columns // _TILE, _TILE, _TILE)
    return tiles.permute(0, 2, 1, 3).reshape(words.shape[0] * _TILE, columns)


def marlin_scales(stored: Tensor) -> Tensor:
    """Scales [G, N] in natural order of `stored` [G, N]."""
    if stored.shape[0] == 1:
        return stored.view(-1, 4, 4, 2).transpose(1, 2).reshape(stored.shape)
    return stored.view(-1, 8, 8).transpose(1, 2).reshape(stored.shape)


def _rows(files: TensorFiles, module: str) -> int:
    return files.shape(f"{module}.B")[0] * _TILE


def _group_size(files: TensorFiles, module: str, declared: DeclaredQuantization | None) -> int:
    words, scales = files.shape(f"{module}.B"), files.shape(f"{module}.s")
    dtypes = files.dtype(f"{module}.B") == torch.int32 and files.dtype(f"{module}.s").is_floating_point
    if not dtypes or not len(words) == len(scales) == 2 or words[1] != 2 * scales[1] or words[1] % 128 or 0 in words:
        raise CheckpointError(
            f"{shapes_of(files, module, _PACKED)} do not belong together, Marlin's layout needs B int32 [K/16, 2N] and "
            f"s [G, N] of floats, N a multiple of 64: {files.file(module + '.B').name} is damaged, download it again"
        )
    return solve_group_size(module, _rows(files, module), scales[0], declared)
