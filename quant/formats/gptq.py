"""GPTQ at 2, 3, 4 and 8 bits: files of AutoGPTQ, GPTQModel, AutoRound, optimum.

Layout (AutoGPTQ qlinear_cuda.py, GPTQModel nn_modules/qlinear), K inputs, N outputs, G = ceil(K / group_size), words of
`width` bits (32; 8, 16 or 64 with GPTQModel's pack_dtype), least significant bits first:
    qweight [ceil(K*bits/width), N] int: the words of a column are one string of bits, the code of row k at bits
        [bits*k, bits*k + bits). 3-bit codes straddle words: 32 of them in 3 words of 32 bits.
    qzeros [G, ceil(N*bits/width)] int: zero points along N in the same way.
    scales [G, N] float.   g_idx [K] int32, optional: the group of each row in natural order.   bias [N], optional.
    W[k, n] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])
Zero points have two encodings: gptq_zeros.py. Any linear layer, lm_head too, may be packed or plain, with bits and a
group of its own: a module is what its tensors are. What a configuration says of single modules is checked against them.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from appliance.kernels.spec import LinearSpec
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.exceptions import (
    NOT_QUANTIZED,
    describe_module,
    exception_lines,
    group_text,
    plain_linears,
)
from appliance.quant.formats.gptq_module import PACKED, inspect_module
from appliance.quant.formats.gptq_zeros import ZeroPoints, decode_zeros, study_zero_points
from appliance.quant.formats.groups import reported_group_size
from appliance.quant.formats.source import check_finite, from_zeros, shapes_of
from appliance.quant.packing import unpack_words
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight


class GptqSource:
    """Reads GPTQ modules. Raises CheckpointError for contradictions, UnsupportedModelError for other bits."""

    def __init__(self, files: TensorFiles, modules: list[str], declared: DeclaredQuantization | None) -> None:
        self._files = files
        self._declared = declared
        self._modules = {
            module: inspect_module(files, module, declared.for_module(module) if declared is not None else None)
            for module in modules
        }
        zeros = study_zero_points(files, self._modules, declared)
        self._version = zeros.version
        self.report = self._report(zeros)

    def plain_names(self) -> list[str]:
        packed = {module + suffix for module in self._modules for suffix in (*PACKED, ".weight")}
        return [name for name in self._files if name not in packed]

    def quantized_modules(self) -> list[str]:
        return list(self._modules)

    def spec(self, module: str) -> LinearSpec:
        found = self._modules[module]
        return LinearSpec(found.rows, found.columns, found.bits, found.group_size, found.permuted)

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        spec = self._modules[module]
        codes = unpack_words(self._files.tensor(f"{module}.qweight"), spec.bits, 0)[: spec.rows]
        zeros = decode_zeros(self._files.tensor(f"{module}.qzeros"), spec.bits, self._version, spec.columns)
        scales = check_finite(self._files.tensor(f"{module}.scales"), f"{module}.scales")
        perm = None
        if spec.permuted:
            perm = torch.argsort(self._files.tensor(f"{module}.g_idx"), stable=True)
            codes = codes[perm]
        return from_zeros(codes, scales, zeros, bits=spec.bits, group_size=spec.group_size, perm=perm)

    def close(self) -> None:
        self._files.close()

    def _report(self, zeros: ZeroPoints) -> FormatReport:
        declared, specs = self._declared, self._modules.values()
        permuted = sum(spec.permuted for spec in specs)
        first = next(iter(self._modules))
        missing = sum(f"{module}.g_idx" not in self._files for module in self._modules)
        evidence = [
            f"{len(specs)} modules hold words packed along K: {shapes_of(self._files, first, PACKED)}",
            f"g_idx is permuted in {permuted} modules and absent in {missing}"
            if self._files.has_data
            else f"g_idx was not read and is absent in {missing}; the configuration implies {permuted} permuted",
            zeros.evidence,
        ]
        warnings = list(zeros.warnings)
        if declared is not None:
            evidence.append(f"{declared.file} says {declared.method or 'no method'}, {declared.bits} bits")
            unordered = [module for module in self._modules if declared.for_module(module).act_order is False]
            contradicting = sum(self._modules[module].permuted for module in unordered)
            if contradicting:
                warnings.append(
                    f"{declared.file} says desc_act false, but {contradicting} modules have a permuted g_idx: "
                    "it is followed"
                )
            excluded = [module for module in self._modules if declared.for_module(module).excluded]
            if excluded:
                warnings.append(
                    f"{declared.file} excludes {len(excluded)} modules from quantisation that are quantised "
                    f"(the first is {excluded[0]}): they are used as they are"
                )
        bits = Counter(spec.bits for spec in specs).most_common(1)[0][0]
        group_size = reported_group_size((spec.rows, spec.group_size) for spec in specs if spec.bits == bits)
        settings = {
            module: describe_module(spec.bits, spec.rows, spec.group_size, group_size)
            for module, spec in self._modules.items()
        }
        settings |= dict.fromkeys(plain_linears(self._files, self._modules), NOT_QUANTIZED)
        return FormatReport(
            format="gptq",
            variant=f"v{zeros.version}",
            bits=bits,
            group_size=group_size,
            symmetric=zeros.symmetric,
            act_order=permuted > 0,
            exceptions=exception_lines(settings, f"{bits}-bit {group_text(group_size)}"),
            evidence=tuple(evidence),
            warnings=tuple(warnings),
        )
