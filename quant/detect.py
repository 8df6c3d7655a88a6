"""Which format a set of safetensors holds: by tensor names and shapes first, by the configuration only as a check."""

from __future__ import annotations

from appliance.errors import CheckpointError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.awq import AwqSource, find_awq_layout
from appliance.quant.formats.awq_layout import AwqLayout
from appliance.quant.formats.canonical import MANIFEST_NAME
from appliance.quant.formats.compressed_tensors import CompressedTensorsSource
from appliance.quant.formats.gptq import GptqSource
from appliance.quant.formats.marlin import MarlinSource
from appliance.quant.formats.plain import PlainSource
from appliance.quant.formats.source import WeightSource
from appliance.quant.refusals import refuse_method, refuse_tensors
from appliance.quant.tensor_files import TensorFiles


def detect_source(files: TensorFiles, declared: DeclaredQuantization | None) -> WeightSource:
    """The reader of `files`.

    Raises UnsupportedModelError naming the format found, CheckpointError for contradictions.
    """
    refuse_tensors(files)
    for name in files:
        if name.endswith(".codes"):
            raise CheckpointError(
                f"{files.file(name).parent} is an incomplete copy of a converted model, {MANIFEST_NAME} is missing: "
                "copy or convert it again"
            )
    packed = [name.removesuffix(".weight_packed") for name in files if name.endswith(".weight_packed")]
    if packed:
        return CompressedTensorsSource(files, packed, declared)
    modules = [name.removesuffix(".qweight") for name in files if name.endswith(".qweight")]
    marlin = [name.removesuffix(".B") for name in files if name.endswith(".B") and f"{name[:-2]}.s" in files]
    if marlin and modules:
        raise CheckpointError(
            f"{marlin[0]} has Marlin's layout, {modules[0]} has words in qweight: one was expected, quantise it again"
        )
    if marlin:
        return MarlinSource(files, marlin, declared)
    if not modules:
        refuse_method(declared)
        return PlainSource(files, declared)
    layouts = {module: _layout(files, module) for module in modules}
    first, layout = next(iter(layouts.items()))
    for module, other in layouts.items():
        if other != layout:
            raise CheckpointError(
                f"{first} has the layout of {_label(layout)}, {module} that of {_label(other)}: one was expected, "
                "quantise it again"
            )
    packing = "gptq" if layout is None else "awq"
    if declared is not None and declared.packing not in (None, packing):
        words = "" if declared.packing == declared.method else f" in words of {declared.packing}"
        raise CheckpointError(
            f"{declared.file} says quant_method {declared.method}{words}, but {first}.qweight has the layout of "
            f"{_label(layout)}: correct the configuration"
        )
    return GptqSource(files, modules, declared) if layout is None else AwqSource(files, modules, layout, declared)


def _layout(files: TensorFiles, module: str) -> AwqLayout | None:
    """The AWQ layout of a module, None for GPTQ's. Words of GPTQ run along K, so it has a column for each output."""
    words = files.shape(f"{module}.qweight")
    scales = files.shape(f"{module}.scales")
    if len(words) != 2 or len(scales) != 2 or 0 in words + scales:
        raise CheckpointError(
            f"{module} in {files.file(module + '.qweight').name} has qweight {list(words)} and scales {list(scales)}, "
            "non-empty matrices were expected: the file is damaged, download it again"
        )
    if f"{module}.g_idx" in files:
        return None
    layout = find_awq_layout(files, module)
    if layout is None and words[1] != scales[1]:
        raise CheckpointError(
            f"{module} in {files.file(module + '.qweight').name} has qweight {list(words)} and scales {list(scales)}, "
            "which fit neither GPTQ ([K/8, N] and [G, N]) nor AWQ's gemm ([K, N/8] and [G, N]), gemv ([N, K/8] and "
            "[N, G]) or gemv_fast (int16 [N/4, K] and [G, N]): the file is damaged, download it again"
        )
    return layout


def _label(layout: AwqLayout | None) -> str:
    return "gptq" if layout is None else f"awq {layout.name}"
