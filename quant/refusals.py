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
_BITSANDBYTES = _Format("bitsandbytes", f"{_FOUR_BIT}, or the unquantised model it was made from")
_BITSANDBYTES_4 = _Format("bitsandbytes at 4 bits (NF4 or FP4)", _BITSANDBYTES.instead)
_BITSANDBYTES_8 = _Format("bitsandbytes at 8 bits (LLM.int8)", _BITSANDBYTES.instead)
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
_OTHER = _Format("a quantisation of another kind", _FOUR_BIT)
_SERVED_METHODS = (None, "gptq", "awq", "auto-round", "intel/auto-round", "marlin", "compressed-tensors", "sparseml")


def refuse_other_formats(files: TensorFiles, declared: DeclaredQuantization | None) -> None:
    """Raises UnsupportedModelError with the evidence, the format's name and what to use instead."""
    for name in files:
        found = _format_of(files, name)
        if found is not None:
            raise UnsupportedModelError(
                f"{files.file(name).name} holds {name} ({files.stored_dtype(name)}), so the model is {found.name}, "
                f"which is not served: {found.instead}"
            )
    if declared is not None and declared.method not in _SERVED_METHODS:
        found = _BY_METHOD.get(declared.method or "", _OTHER)
        raise UnsupportedModelError(
            f"{declared.file} says quant_method {declared.method}, so the model is {found.name}, which is not served: "
            f"{found.instead}"
        )


def _format_of(files: TensorFiles, name: str) -> _Format | None:
    module, _, suffix = name.rpartition(".")
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    if suffix.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in files:
        return _MXFP4
    if suffix == "weight_scale":
        return None if f"{module}.weight_packed" in files else _scaled(files, module)
    return _of_dtype(files, name, module) if suffix in ("weight", "weight_packed") else None


def _scaled(files: TensorFiles, module: str) -> _Format | None:
    """Of a module with weight_scale and a weight that is not packed."""
    weight = f"{module}.weight"
    if weight not in files:
        return None
    return _of_dtype(files, weight, module) or _UNPACKED


def _of_dtype(files: TensorFiles, name: str, module: str) -> _Format | None:
    dtype = files.stored_dtype(name)
    if dtype.startswith("F8_"):
        return _FP8_BLOCK if f"{module}.weight_scale_inv" in files else _FP8_TENSOR
    if dtype == "U8":
        if f"{name}.absmax" in files:
            return _BITSANDBYTES_4
        is_nvfp4 = f"{module}.weight_scale_2" in files or f"{module}.weight_global_scale" in files
        return _NVFP4 if is_nvfp4 else _MXFP4 if f"{module}.weight_scale" in files else None
    if dtype == "I8":
        return _BITSANDBYTES_8 if f"{module}.SCB" in files else _W8A8 if f"{module}.weight_scale" in files else None
    return _MLX if dtype == "U32" and f"{module}.biases" in files else None
