"""Formats that are known and not served: how each is told, from tensors or quant_method, and what to use instead.

Tensor names and dtypes are those of each format's own writer: exllamav2 and exllamav3, bitsandbytes, ModelOpt,
compressed-tensors, gpt-oss (MXFP4), HQQ, AQLM, QuIP#, mlx-lm.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import UnsupportedModelError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.tensor_files import TensorFiles


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    instead: str
    """The nearest thing that is served."""


_FOUR_BIT = "use the model's 4-bit GPTQ, AWQ or GGUF"
_SMALLER = "use the unquantised model or its 8- or 4-bit GPTQ, AWQ, compressed-tensors (W8A16, W4A16) or GGUF"

_EXL2 = _Format("EXL2 (ExLlamaV2)", _FOUR_BIT)
_EXL3 = _Format("EXL3 (ExLlamaV3)", _FOUR_BIT)
_BITSANDBYTES = _Format("bitsandbytes", _SMALLER)
_BITSANDBYTES_4 = _Format("bitsandbytes at 4 bits (NF4 or FP4)", _SMALLER)
_BITSANDBYTES_8 = _Format("bitsandbytes at 8 bits (LLM.int8)", _SMALLER)
_FP8 = _Format("FP8", _SMALLER)
_FP8_TENSOR = _Format("FP8 with a scale per tensor or channel", _SMALLER)
_FP8_BLOCK = _Format("block-wise FP8", _SMALLER)
_NVFP4 = _Format("NVFP4", _FOUR_BIT)
_MXFP4 = _Format("MXFP4", _FOUR_BIT)
_MODELOPT = _Format("ModelOpt's FP8 or NVFP4", _SMALLER)
_SPARSE = _Format("2:4 sparsity", "use the model's dense checkpoint, unquantised or compressed-tensors pack-quantized")
_W8A8 = _Format("int-quantized (W8A8, 8-bit weights for 8-bit activations)", _SMALLER)
_UNPACKED = _Format("compressed-tensors that was saved uncompressed", "save it again as pack-quantized")
_HQQ = _Format("HQQ", _FOUR_BIT)
_TORCHAO = _Format("torchao", _FOUR_BIT)
_AQLM = _Format("AQLM", _FOUR_BIT)
_QUIP = _Format("QuIP#", _FOUR_BIT)
_MLX = _Format("MLX (for Apple's chips)", _FOUR_BIT)

# The last part of the name of a tensor that only this format has.
_BY_SUFFIX = {
    "q_weight": _EXL2,
    "trellis": _EXL3,
    "absmax": _BITSANDBYTES_4,
    "SCB": _BITSANDBYTES_8,
    "weight_scale_inv": _FP8_BLOCK,
    "weight_scale_2": _NVFP4,
    "weight_global_scale": _NVFP4,
    "bitmask": _SPARSE,
    "scale_packed": _SPARSE,
    "W_q": _HQQ,
    "codebooks": _AQLM,
    "Qidxs": _QUIP,
}
_BY_METHOD = {
    "exl2": _EXL2,
    "exl3": _EXL3,
    "bitsandbytes": _BITSANDBYTES,
    "fp8": _FP8,
    "fbgemm_fp8": _FP8_TENSOR,
    "modelopt": _MODELOPT,
    "modelopt_fp4": _NVFP4,
    "mxfp4": _MXFP4,
    "hqq": _HQQ,
    "torchao": _TORCHAO,
    "aqlm": _AQLM,
    "quip": _QUIP,
    "quip_sharp": _QUIP,
}
# A weight that is not packed, but has scales.
_SCALED = {"I8": _W8A8, **dict.fromkeys(("F16", "BF16", "F32"), _UNPACKED)}
_OTHER = _Format("a quantisation of another kind", _FOUR_BIT)
_SERVED_METHODS = (None, "gptq", "awq", "auto-round", "intel/auto-round", "marlin", "compressed-tensors", "sparseml")


def refuse_tensors(files: TensorFiles) -> None:
    """Raises UnsupportedModelError naming a tensor of a format that is not served, and what to use instead."""
    for format_of in (_of_name, _of_dtype):  # names tell more: a block-wise FP8 from another
        for name in files:
            found = format_of(files, name)
            if found is not None:
                raise UnsupportedModelError(
                    f"{files.file(name).name} holds {name} ({files.stored_dtype(name)}), so the model is {found.name}, "
                    f"which is not served: {found.instead}"
                )


def refuse_method(declared: DeclaredQuantization | None) -> None:
    """The same for a declared method of which no tensor shows anything (torchao)."""
    if declared is not None and declared.method not in _SERVED_METHODS:
        found = _BY_METHOD.get(declared.method or "", _OTHER)
        raise UnsupportedModelError(
            f"{declared.file} says quant_method {declared.method}, so the model is {found.name}, which is not served: "
            f"{found.instead}"
        )


def _of_name(files: TensorFiles, name: str) -> _Format | None:
    if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in files:
        return _MXFP4
    return _BY_SUFFIX.get(name.rpartition(".")[2])


def _of_dtype(files: TensorFiles, name: str) -> _Format | None:
    module, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "weight_packed"):
        return None
    dtype = files.stored_dtype(name)
    if dtype.startswith("F8_"):
        return _FP8_TENSOR
    if dtype == "U32" and f"{module}.biases" in files:
        return _MLX
    if f"{module}.weight_scale" not in files:
        return None
    if dtype == "U8":
        return _MXFP4
    return _SCALED.get(dtype) if suffix == "weight" else None
