"""AWQ, 4-bit, AutoAWQ's `gemm` layout.

Layout (AutoAWQ modules/linear/gemm.py, utils/packing_utils.py), K inputs, N outputs, G = ceil(K / group_size):
    qweight [K, N/8] int32: code of column 8c + j in word c, nibble [0, 4, 1, 5, 2, 6, 3, 7][j].
    qzeros [G, N/8] int32: in the same order, the zero points as they are (nothing is subtracted).
    scales [G, N] float.   bias [N], optional.   There is no g_idx.
    W[k, n] = scales[k // group_size, n] * (code[k, n] - zero[k // group_size, n])
AutoRound may leave qzeros out of symmetric files: then every zero point is 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.groups import reported_group_size, solve_group_size
from appliance.quant.formats.source import check_finite, from_zeros, shapes_of
from appliance.quant.packing import unpack_words
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
_BITS = 4
_PACKED = (".qweight", ".qzeros", ".scales")


class AwqSource:
    """Reads AWQ gemm modules. Raises CheckpointError for contradictions."""

    def __init__(self, files: TensorFiles, modules: list[str], declared: DeclaredQuantization | None) -> None:
        if declared is not None and declared.bits not in (None, _BITS):
            raise CheckpointError(
                f"{declared.file} says {declared.bits} bits, but {modules[0]}.qweight and .scales have the shapes of "
                "4-bit AWQ: correct the configuration"
            )
        self._files = files
        self._group_sizes = {module: _group_size(files, module, declared) for module in modules}
        symmetric = all(self._symmetric(module) for module in modules)
        evidence = [
            f"{len(modules)} modules hold words packed along N: {shapes_of(files, modules[0], _PACKED)}",
            "every zero point is 8: symmetric" if symmetric else "zero points differ: asymmetric",
        ]
        if declared is not None:
            evidence.append(f"{declared.file} says {declared.method or 'no method'}, {declared.layout or 'no version'}")
        self.report = FormatReport(
            format="awq",
            variant="gemm",
            bits=_BITS,
            group_size=reported_group_size(
                (files.shape(f"{module}.qweight")[0], size) for module, size in self._group_sizes.items()
            ),
            symmetric=symmetric,
            act_order=False,
            evidence=tuple(evidence),
        )

    def plain_names(self) -> list[str]:
        packed = {module + suffix for module in self._group_sizes for suffix in _PACKED}
        return [name for name in self._files if name not in packed]

    def quantized_modules(self) -> list[str]:
        return list(self._group_sizes)

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        codes = unpack_words(self._files.tensor(f"{module}.qweight"), _BITS, 1, NIBBLE_OF_COLUMN)
        scales = check_finite(self._files.tensor(f"{module}.scales"), f"{module}.scales")
        if f"{module}.qzeros" in self._files:
            zeros = unpack_words(self._files.tensor(f"{module}.qzeros"), _BITS, 1, NIBBLE_OF_COLUMN)
        else:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        return from_zeros(codes, scales, zeros, bits=_BITS, group_size=self._group_sizes[module])

    def close(self) -> None:
        self._files.close()

    def _symmetric(self, module: str) -> bool:
        name = f"{module}.qzeros"
        # 0x88888888 as int32
        return name not in self._files or bool((self._files.tensor(name) == 0x88888888 - (1 << 32)).all())


def _group_size(files: TensorFiles, module: str, declared: DeclaredQuantization | None) -> int:
    rows, words = files.shape(f"{module}.qweight")
    groups, _ = files.shape(f"{module}.scales")
    if files.dtype(f"{module}.qweight") != torch.int32:
        raise UnsupportedModelError(
            f"{module}.qweight has dtype {files.dtype(f'{module}.qweight')}, AWQ words of int32 are supported"
        )
    zeros = f"{module}.qzeros"
    if zeros in files and (files.shape(zeros) != (groups, words) or files.dtype(zeros) != torch.int32):
        raise CheckpointError(
            f"{zeros} is {files.dtype(zeros)} {list(files.shape(zeros))}, int32 {[groups, words]} was expected from "
            f"qweight and scales: {files.file(zeros).name} is damaged or of another AWQ version"
        )
    return solve_group_size(module, rows, groups, declared)
