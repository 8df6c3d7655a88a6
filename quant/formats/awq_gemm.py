"""AWQ's `gemm` layout, the one nearly every file has; AutoRound's auto_awq and llm-awq's first version write it too.

Layout (AutoAWQ modules/linear/gemm.py, utils/packing_utils.py), K inputs, N outputs, G = K / group_size:
    qweight [K, N/8] int32: code of output 8c + j in word c, nibble [0, 4, 1, 5, 2, 6, 3, 7][j].
    qzeros [G, N/8] int32, optional: zero points in the same order, as they are (nothing is subtracted).
    scales [G, N] float.
    W[k, n] = scales[k // group_size, n] * (code[k, n] - zero[k // group_size, n])
"""

from __future__ import annotations

import torch

from appliance.quant.formats.awq_layout import BITS, FLOATS, MIDDLE, Extent, check_tensor, read_scales
from appliance.quant.formats.source import from_zeros
from appliance.quant.packing import unpack_words
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
# 0x88888888 as int32
_SYMMETRIC = 0x88888888 - (1 << 32)


class GemmLayout:
    name = "gemm"
    zeros = ".qzeros"

    def matches(self, files: TensorFiles, module: str) -> bool:
        return files.shape(f"{module}.qweight")[1] * 8 == files.shape(f"{module}.scales")[1]

    def extent(self, files: TensorFiles, module: str) -> Extent:
        inputs, words = files.shape(f"{module}.qweight")
        groups, outputs = files.shape(f"{module}.scales")
        check_tensor(files, f"{module}.qweight", (torch.int32,), (inputs, words))
        check_tensor(files, f"{module}.scales", FLOATS, (groups, outputs))
        if f"{module}.qzeros" in files:
            check_tensor(files, f"{module}.qzeros", (torch.int32,), (groups, words))
        return Extent(inputs, groups, outputs)

    def is_symmetric(self, files: TensorFiles, module: str, groups: int) -> bool:
        name = f"{module}.qzeros"
        return name not in files or bool((files.tensor(name) == _SYMMETRIC).all())

    def read(self, files: TensorFiles, module: str, group_size: int) -> QuantizedWeight:
        codes = unpack_words(files.tensor(f"{module}.qweight"), BITS, 1, NIBBLE_OF_COLUMN)
        scales = read_scales(files, f"{module}.scales")
        if f"{module}.qzeros" in files:
            zeros = unpack_words(files.tensor(f"{module}.qzeros"), BITS, 1, NIBBLE_OF_COLUMN)
        else:
            zeros = torch.full(scales.shape, MIDDLE, dtype=torch.uint8)
        return from_zeros(codes, scales, zeros, bits=BITS, group_size=group_size)
