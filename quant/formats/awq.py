"""AWQ, 4-bit: files of AutoAWQ, llm-awq, AutoRound. It knows modules and configuration; a layout knows the bits.

awq_gemm, awq_gemv and awq_gemv_fast are the layouts. In none is there a g_idx, and a bias [N] stays a plain tensor.
Where no zero points are stored every one is 8.
"""

from __future__ import annotations

from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.spec import LinearSpec
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.awq_gemm import GemmLayout
from appliance.quant.formats.awq_gemv import GemvLayout
from appliance.quant.formats.awq_gemv_fast import GemvFastLayout
from appliance.quant.formats.awq_layout import BITS, AwqLayout, Extent
from appliance.quant.formats.groups import reported_group_size, solve_group_size
from appliance.quant.formats.source import shapes_of
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

# In the order in which they are looked for. gemv before gemm: 32 inputs in one group have the shapes of both.
_LAYOUTS: tuple[AwqLayout, ...] = (
    GemvFastLayout("llm-awq", ".scaled_zeros"),
    GemvFastLayout("gemv_fast", ".qzeros"),
    GemvLayout(),
    GemmLayout(),
)
# The layouts that a declared `version` or `backend` stands for; the last three name kernels for gemm files.
_DECLARED = {
    "gemm": ("gemm",),
    "gemv": ("gemv",),
    "gemv_fast": ("gemv_fast", "llm-awq"),
    "llm-awq": ("gemv_fast", "llm-awq"),
    "exllama": ("gemm",),
    "exllamav2": ("gemm",),
    "ipex": ("gemm",),
}


def find_awq_layout(files: TensorFiles, module: str) -> AwqLayout | None:
    """The layout of a module whose qweight and scales are matrices and that has no g_idx; None if it is not AWQ's.

    Raises UnsupportedModelError for the words of the Marlin kernel.
    """
    for layout in _LAYOUTS:
        if layout.matches(files, module):
            return layout
    words, scales = files.shape(f"{module}.qweight"), files.shape(f"{module}.scales")
    if words[1] == 2 * scales[1] and f"{module}.qzeros" not in files:  # AutoAWQ modules/linear/marlin.py
        raise UnsupportedModelError(
            f"{module} has AWQ's marlin layout, which is an order for one GPU kernel; AWQ's gemm, gemv, gemv_fast and "
            "llm-awq layouts and GPTQ are supported: save the model again with version gemm, or use its GPTQ checkpoint"
        )
    return None


class AwqSource:
    """Reads AWQ modules of one layout. Raises CheckpointError for contradictions."""

    def __init__(
        self, files: TensorFiles, modules: list[str], layout: AwqLayout, declared: DeclaredQuantization | None
    ) -> None:
        if declared is not None and declared.bits not in (None, BITS):
            raise CheckpointError(
                f"{declared.file} says {declared.bits} bits, but {modules[0]}.qweight and .scales have the shapes of "
                "4-bit AWQ: correct the configuration"
            )
        self._files = files
        self._layout = layout
        self._packed = (".qweight", layout.zeros, ".scales")
        self._extents = extents = {module: layout.extent(files, module) for module in modules}
        self._check_zeros(modules, declared)
        self._group_sizes = {module: self._group_size(module, extent, declared) for module, extent in extents.items()}
        if files.has_data:
            symmetric = all(layout.is_symmetric(files, module, extents[module].groups) for module in modules)
            zeros = "every zero point is 8: symmetric" if symmetric else "zero points differ: asymmetric"
        else:
            symmetric = modules[0] + layout.zeros not in files
            zeros = (
                "no zero points are stored: symmetric" if symmetric else "zero points are stored, they were not read"
            )
        evidence = [
            f"{len(modules)} modules hold words of AWQ's {layout.name} layout: "
            f"{shapes_of(files, modules[0], self._packed)}",
            zeros,
        ]
        warnings = []
        if declared is not None:
            evidence.append(f"{declared.file} says {declared.method or 'no method'}, {declared.layout or 'no version'}")
            if declared.layout is not None and layout.name not in _DECLARED.get(declared.layout, ()):
                warnings.append(
                    f"{declared.file} says AWQ version {declared.layout}, but the tensors have the layout of "
                    f"{layout.name}: they are followed"
                )
        self.report = FormatReport(
            format="awq",
            variant=layout.name,
            bits=BITS,
            group_size=reported_group_size(
                (extents[module].inputs, size) for module, size in self._group_sizes.items()
            ),
            symmetric=symmetric,
            act_order=False,
            evidence=tuple(evidence),
            warnings=tuple(warnings),
        )

    def plain_names(self) -> list[str]:
        packed = {module + suffix for module in self._group_sizes for suffix in self._packed}
        return [name for name in self._files if name not in packed]

    def quantized_modules(self) -> list[str]:
        return list(self._group_sizes)

    def spec(self, module: str) -> LinearSpec:
        extent = self._extents[module]
        return LinearSpec(extent.inputs, extent.outputs, BITS, self._group_sizes[module])

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        return self._layout.read(self._files, module, self._group_sizes[module])

    def close(self) -> None:
        self._files.close()

    def _group_size(self, module: str, extent: Extent, declared: DeclaredQuantization | None) -> int:
        size = solve_group_size(module, extent.inputs, extent.groups, declared)
        if size * extent.groups != extent.inputs:  # no packer of AWQ takes such a module
            raise CheckpointError(
                f"{module}.qweight in {self._files.file(module + '.qweight').name} is for {extent.inputs} inputs, a "
                f"multiple of the group size {size} was expected: the file is damaged, download it again"
            )
        return size

    def _check_zeros(self, modules: list[str], declared: DeclaredQuantization | None) -> None:
        """Zero points are absent only where nothing says that they exist: a lost tensor must not read as 8."""
        names = [module + self._layout.zeros for module in modules]
        absent = next((name for name in names if name not in self._files), None)
        if absent is None:
            return
        present = next((name for name in names if name in self._files), None)
        if present is not None:
            reason = f"{present} is there"
        elif declared is not None and (declared.zero_point or declared.symmetric is False):
            reason = f"{declared.file} says that zero points are stored"
        else:
            return
        raise CheckpointError(f"{absent} is missing, it was expected because {reason}: download the model again")
