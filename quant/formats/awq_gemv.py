"""AWQ's `gemv` layout: words along K, everything transposed with respect to gemm.

Layout (AutoAWQ modules/linear/gemv.py), K inputs, N outputs, G = K / group_size:
    qweight [N, K/8] int32: code of input 8c + j in word c, nibble j.
    qzeros [N, P/8] int32, optional: zero point of group 8c + j in word c, nibble j, as it is.
    scales [N, P] float.
    P is G rounded up to 8 (16 for groups of 64, 32 for groups of 32); columns from G on are zero padding.
    W[k, n] = scales[n, k // group_size] * (code[n, k] - zero[n, k // group_size])
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.quant.formats.awq_layout import BITS, FLOATS, MIDDLE, Extent, check_tensor, padded_groups, read_scales
from appliance.quant.formats.source import from_zeros
from appliance.quant.packing import unpack_words
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight


class GemvLayout:
    name = "gemv"
    zeros = ".qzeros"

    def matches(self, files: TensorFiles, module: str) -> bool:
        words, scales = files.shape(f"{module}.qweight"), files.shape(f"{module}.scales")
        if words == scales and f"{module}.qzeros" in files:
            # Also the shapes of 2-bit GPTQ without g_idx, whose words hold 16 zero points.
            return files.shape(f"{module}.qzeros") == (scales[0], -(-scales[1] // 8))
        return words[0] == scales[0]

    def extent(self, files: TensorFiles, module: str) -> Extent:
        outputs, words = files.shape(f"{module}.qweight")
        padded = files.shape(f"{module}.scales")[1]
        check_tensor(files, f"{module}.qweight", (torch.int32,), (outputs, words))
        check_tensor(files, f"{module}.scales", FLOATS, (outputs, padded))
        if f"{module}.qzeros" in files:
            check_tensor(files, f"{module}.qzeros", (torch.int32,), (outputs, -(-padded // 8)))
        return Extent(words * 8, padded_groups(files.tensor(f"{module}.scales").t()), outputs)

    def is_symmetric(self, files: TensorFiles, module: str, groups: int) -> bool:
        return f"{module}.qzeros" not in files or bool((_zeros(files, module, groups) == MIDDLE).all())

    def read(self, files: TensorFiles, module: str, group_size: int) -> QuantizedWeight:
        codes = unpack_words(files.tensor(f"{module}.qweight"), BITS, 1).t().contiguous()
        groups = codes.shape[0] // group_size
        scales = read_scales(files, f"{module}.scales")[:, :groups].t()
        if f"{module}.qzeros" in files:
            zeros = _zeros(files, module, groups)
        else:
            zeros = torch.full(scales.shape, MIDDLE, dtype=torch.uint8)
        return from_zeros(codes, scales, zeros, bits=BITS, group_size=group_size)


def _zeros(files: TensorFiles, module: str, groups: int) -> Tensor:
    """Zero points [G, N] without the padding."""
    return unpack_words(files.tensor(f"{module}.qzeros"), BITS, 1)[:, :groups].t().contiguous()
