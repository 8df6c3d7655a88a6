"""Which format a set of safetensors holds: by tensor names and shapes first, by the configuration only as a check."""

from __future__ import annotations

import torch

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.awq import AwqSource
from appliance.quant.formats.canonical import MANIFEST_NAME
from appliance.quant.formats.compressed_tensors import CompressedTensorsSource
from appliance.quant.formats.gptq import GptqSource
from appliance.quant.formats.plain import PlainSource
from appliance.quant.formats.source import WeightSource
from appliance.quant.refusals import refuse_method, refuse_tensors
from appliance.quant.tensor_files import TensorFiles

_SUPPORTED = "supported are GPTQ and AWQ (gemm) at 4 bits, compressed-tensors, GGUF, and unquantised safetensors"
_AWQ_LAYOUTS = ("gemv", "gemv_fast", "llm-awq", "marlin")


def detect_source(files: TensorFiles, declared: DeclaredQuantization | None) -> WeightSource:
    """The reader of `files`.

    Raises UnsupportedModelError naming the format found, CheckpointError for contradictions.
    """
    refuse_tensors(files)
    for name in files:
        if name.endswith(".B") and f"{name[:-2]}.s" in files:
            raise UnsupportedModelError(
                f"the model is GPTQ in marlin layout (tensor {name}), {_SUPPORTED}: use one of these"
            )
        if name.endswith(".codes"):
            raise CheckpointError(
                f"{files.file(name).parent} is an incomplete copy of a converted model, {MANIFEST_NAME} is missing: "
                "copy or convert it again"
            )
    packed = [name.removesuffix(".weight_packed") for name in files if name.endswith(".weight_packed")]
    if packed:
        return CompressedTensorsSource(files, packed, declared)
    modules = [name.removesuffix(".qweight") for name in files if name.endswith(".qweight")]
    if not modules:
        refuse_method(declared)
        return PlainSource(files, declared)
    layouts = {module: _layout(files, module, declared) for module in modules}
    first, layout = next(iter(layouts.items()))
    for module, other in layouts.items():
        if other != layout:
            raise CheckpointError(
                f"{first} has the layout of {layout}, {module} that of {other}: one was expected, quantise it again"
            )
    method = declared.method if declared is not None else None
    if declared is not None and method not in (None, layout, "auto-round", "intel/auto-round"):
        raise CheckpointError(
            f"{declared.file} says quant_method {method}, but {first}.qweight has the layout of {layout}: "
            "correct the configuration"
        )
    return GptqSource(files, modules, declared) if layout == "gptq" else AwqSource(files, modules, declared)


def _layout(files: TensorFiles, module: str, declared: DeclaredQuantization | None) -> str:
    """gptq or awq. Words of GPTQ run along K and those of AWQ along N, so the columns tell; AWQ never has g_idx."""
    if declared is not None and declared.method == "awq" and declared.layout in _AWQ_LAYOUTS:
        raise UnsupportedModelError(
            f"{declared.file} says AWQ version {declared.layout}, {_SUPPORTED}: use one of these"
        )
    words = files.shape(f"{module}.qweight")
    scales = files.shape(f"{module}.scales")
    if len(words) != 2 or len(scales) != 2:
        raise CheckpointError(
            f"{module} has qweight {list(words)} and scales {list(scales)}, matrices were expected: the file is damaged"
        )
    if f"{module}.g_idx" in files or words[1] == scales[1]:
        return "gptq"
    if files.dtype(f"{module}.qweight") == torch.int16:
        raise UnsupportedModelError(
            f"{module}.qweight is int16, AWQ's gemv_fast layout, {_SUPPORTED}: use one of these"
        )
    if words[1] * 8 == scales[1]:
        return "awq"
    if words[1] == 2 * scales[1] and f"{module}.qzeros" not in files:
        raise UnsupportedModelError(f"{module} has AWQ's marlin layout, {_SUPPORTED}: use one of these")
    if words[0] == scales[0]:
        raise UnsupportedModelError(f"{module} has AWQ's gemv layout, {_SUPPORTED}: use one of these")
    raise CheckpointError(
        f"{module} has qweight {list(words)} and scales {list(scales)}, which fit neither GPTQ ([K/8, N] and [G, N]) "
        "nor AWQ ([K, N/8] and [G, N]): the file is damaged, download it again"
    )
