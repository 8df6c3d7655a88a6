"""AWQ's `gemv_fast` layout, which is llm-awq's second: int16 words that interleave four outputs, scaled zero points.

Layout (AutoAWQ modules/linear/gemv_fast.py, llm-awq awq/quantize/qmodule.py), K inputs, N outputs, G = K / group_size:
    qweight [N/4, K] int16: column 64b + 16r + 8h + i of row R holds, in nibble t, the code of output 4R + r and input
        64b + 32h + 8t + i (r, t below 4, h below 2, i below 8).
    qzeros (AutoAWQ) or scaled_zeros (llm-awq) [P, N] float, optional: -scale * zero, rounded to its dtype.
    scales [P, N] float.
    P is G rounded up to 8 (16 for groups of 64, 32 for groups of 32); rows from G on are zero padding.
    W[k, n] = scales[k // group_size, n] * code[k, n] + qzeros[k // group_size, n]
The kernels add the rounded product, so it is the offset here and no integer zero point is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from appliance.errors import CheckpointError
from appliance.quant.formats.awq_layout import BITS, FLOATS, MIDDLE, Extent, check_tensor, padded_groups, read_scales
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class GemvFastLayout:
    """Two writers, two names of the tensor of zero points."""

    name: str
    zeros: str

    def matches(self, files: TensorFiles, module: str) -> bool:
        words, scales, zeros = f"{module}.qweight", f"{module}.scales", module + self.zeros
        if files.dtype(words) != torch.int16 or files.shape(words)[0] * 4 != files.shape(scales)[1]:
            return False
        if zeros in files:  # GPTQModel can pack GPTQ into int16 words too, its zero points are integers
            return files.dtype(zeros).is_floating_point
        return self.zeros == ".qzeros"  # without zero points the two writers' files are the same

    def extent(self, files: TensorFiles, module: str) -> Extent:
        name = f"{module}.qweight"
        inputs = files.shape(name)[1]
        padded, outputs = files.shape(f"{module}.scales")
        if inputs % 64:
            raise CheckpointError(
                f"{name} in {files.file(name).name} has {inputs} columns, a multiple of 64 was expected of AWQ's "
                f"{self.name} layout: the file is damaged, download it again"
            )
        check_tensor(files, f"{module}.scales", FLOATS, (padded, outputs))
        if module + self.zeros in files:
            check_tensor(files, module + self.zeros, FLOATS, (padded, outputs))
        return Extent(inputs, padded_groups(files.tensor(f"{module}.scales")), outputs)

    def is_symmetric(self, files: TensorFiles, module: str, groups: int) -> bool:
        if module + self.zeros not in files:
            return True
        zeros, scales = files.tensor(module + self.zeros)[:groups], files.tensor(f"{module}.scales")[:groups]
        return torch.equal(zeros.float(), -MIDDLE * scales.float())

    def read(self, files: TensorFiles, module: str, group_size: int) -> QuantizedWeight:
        words = files.tensor(f"{module}.qweight")
        rows, inputs = words.shape
        fields = words.view(rows, inputs // 64, 4, 2, 8)  # R, b, r, h, i
        nibbles = torch.stack([((fields >> 4 * t) & 15).to(torch.uint8) for t in range(4)], 4)  # R, b, r, h, t, i
        codes = nibbles.permute(1, 3, 4, 5, 0, 2).reshape(inputs, rows * 4)
        groups = inputs // group_size
        scales = read_scales(files, f"{module}.scales")[:groups].float()
        if module + self.zeros in files:
            offsets = read_scales(files, module + self.zeros)[:groups].float()
        else:
            offsets = -MIDDLE * scales
        return QuantizedWeight(codes, scales, offsets, BITS, group_size)
