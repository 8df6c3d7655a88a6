"""Rounding a weight to nearest, in GPTQ's layout: no calibration, so quick and of lower quality. It knows no files.

Symmetric; zero points are stored minus one, as the format's version 1 has it, so that AutoGPTQ, vLLM, Transformers and
we read the same weights. Layout: formats/gptq.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.quant.packing import pack_words


def round_to_gptq(weight: Tensor, bits: int, group_size: int) -> dict[str, Tensor]:
    """GPTQ's tensors of a weight [N, K]: qweight [K*bits/32, N] and qzeros [G, N*bits/32] int32, scales [G, N] float16,
    g_idx [K] int32.

    group_size: rows of K that share a scale, a divisor of K; -1 is all of K. K and N fill whole words.
    """
    N, K = weight.shape
    size = K if group_size == -1 else group_size
    zero = 1 << (bits - 1)  # the code that stands for 0
    groups = weight.float().view(N, K // size, size)
    scales = (groups.abs().amax(-1) / (zero - 0.5)).clamp(min=1e-6).half()  # [N, G]; a group of zeros has one too
    codes = (groups / scales.float().unsqueeze(-1)).round().add_(zero).clamp_(0, 2 * zero - 1)
    zeros = torch.full((K // size, N), zero - 1, dtype=torch.uint8)
    return {
        "qweight": pack_words(codes.view(N, K).t().to(torch.uint8), bits, 0),
        "qzeros": pack_words(zeros, bits, 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(K, dtype=torch.int32) // size,
    }
