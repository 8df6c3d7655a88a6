"""Which linear layers of up to 4 bits run on an NVIDIA card through Triton. Imports Triton only when one is packed."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from appliance.kernels.spec import AffineWeight, LinearKernel, LinearSpec, Target
from appliance.kernels.w4a16_pack import pack_w4, run_group_size


def refuse(spec: LinearSpec, target: Target) -> str | None:
    if target.device != "cuda":
        return f"needs an NVIDIA card, found {target.device}"
    if not spec.is_quantized:
        return "needs a quantised weight, found a dense one"
    if spec.bits > 4:
        return f"needs codes of at most 4 bits, found {spec.bits}"
    if target.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16 activations, found {str(target.dtype).removeprefix('torch.')}"
    if run_group_size(spec) is None:
        return f"needs a group of 32, 64, a multiple of 128 or all of K, found {spec.group_size}"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    return None


def pack(weight: AffineWeight | Tensor, dtype: torch.dtype) -> LinearKernel:
    from appliance.kernels.triton_w4a16 import TritonW4A16Linear

    assert not isinstance(weight, Tensor), "refuse() lets no dense weight through"
    return TritonW4A16Linear(pack_w4(weight))
