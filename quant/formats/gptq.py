"""GPTQ, 4-bit: files of AutoGPTQ, GPTQModel, AutoRound, optimum.

Layout (AutoGPTQ qlinear_cuda.py, GPTQModel nn_modules/qlinear), K inputs, N outputs, G = ceil(K / group_size):
    qweight [ceil(K/8), N] int32: code of row k in word k // 8, nibble k % 8, least significant first.
    qzeros [G, N/8] int32: zero point of column n in word n // 8, nibble n % 8.
    scales [G, N] float.   g_idx [K] int32, optional: the group of each row in natural order.   bias [N], optional.
    W[k, n] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])
Zero points have two encodings: gptq_zeros.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.gptq_zeros import ZeroPoints, decode_zeros, study_zero_points
from appliance.quant.formats.groups import reported_group_size, solve_group_size
from appliance.quant.formats.source import check_finite, from_zeros, shapes_of
from appliance.quant.packing import unpack_words
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

_BITS = 4
_PACKED = (".qweight", ".qzeros", ".scales", ".g_idx")


@dataclass(frozen=True, slots=True)
class _Module:
    rows: int
    columns: int
    group_size: int
    permuted: bool


class GptqSource:
    """Reads GPTQ modules. Raises CheckpointError for contradictions, UnsupportedModelError for other bits."""

    def __init__(self, files: TensorFiles, modules: list[str], declared: DeclaredQuantization | None) -> None:
        self._files = files
        self._declared = declared
        self._modules = {module: self._inspect(module) for module in modules}
        zeros = study_zero_points(files, modules, declared)
        self._version = zeros.version
        self.report = self._report(zeros)

    def plain_names(self) -> list[str]:
        return [name for name in self._files if _module_of(name) not in self._modules]

    def quantized_modules(self) -> list[str]:
        return list(self._modules)

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        spec = self._modules[module]
        codes = unpack_words(self._files.tensor(f"{module}.qweight"), _BITS, 0)[: spec.rows]
        zeros = decode_zeros(self._files.tensor(f"{module}.qzeros"), self._version, spec.columns)
        scales = check_finite(self._files.tensor(f"{module}.scales"), f"{module}.scales")
        perm = None
        if spec.permuted:
            perm = torch.argsort(self._files.tensor(f"{module}.g_idx"), stable=True)
            codes = codes[perm]
        return from_zeros(codes, scales, zeros, bits=_BITS, group_size=spec.group_size, perm=perm)

    def close(self) -> None:
        self._files.close()

    def _inspect(self, module: str) -> _Module:
        """Shapes, bits, groups and row order of one module, checked against each other and the declaration."""
        files = self._files
        for suffix in (".qweight", ".qzeros"):
            if files.dtype(module + suffix) != torch.int32:
                raise UnsupportedModelError(
                    f"{module}{suffix} has dtype {files.dtype(module + suffix)}, GPTQ words of int32 are supported"
                )
        words, zeros, scales = (files.shape(module + suffix) for suffix in (".qweight", ".qzeros", ".scales"))
        order = files.shape(f"{module}.g_idx") if f"{module}.g_idx" in files else None
        candidates: list[int] = []
        if len(words) == len(zeros) == len(scales) == 2 and 0 not in words and (order is None or len(order) == 1):
            candidates = [
                bits
                for bits in (2, 3, 4, 8)
                if scales == (zeros[0], words[1])
                and zeros[1] == -(-words[1] * bits // 32)
                and (order is None or words[0] == -(-order[0] * bits // 32))
            ]
        if not candidates:
            raise CheckpointError(
                f"the shapes of {shapes_of(files, module, _PACKED)} do not belong together, GPTQ needs qweight "
                "[K*bits/32, N], qzeros [G, N*bits/32], scales [G, N] and g_idx [K]: "
                f"{files.file(module + '.qweight').name} is damaged, download it again"
            )
        bits = self._bits(module, candidates)
        if bits != _BITS:
            raise UnsupportedModelError(f"{module} is {bits}-bit GPTQ, 4-bit is supported: use a 4-bit checkpoint")
        rows = order[0] if order is not None else words[0] * 8
        group_size = solve_group_size(module, rows, scales[0], self._declared)
        return _Module(rows, words[1], group_size, self._permuted(module, rows, scales[0], group_size))

    def _bits(self, module: str, candidates: list[int]) -> int:
        declared = self._declared
        if declared is not None and declared.bits is not None:
            if declared.bits in candidates:
                return declared.bits
            if not declared.overrides:
                raise CheckpointError(
                    f"{declared.file} says {declared.bits} bits, but the shapes of {module}.qweight and .qzeros are "
                    f"those of {candidates[-1]} bits: correct the configuration"
                )
        return _BITS if _BITS in candidates else candidates[-1]

    def _permuted(self, module: str, rows: int, groups: int, group_size: int) -> bool:
        """Whether the rows are grouped by a permutation: decided by g_idx, never by the flag."""
        declared = self._declared
        natural = torch.arange(rows) // group_size
        order = self._files.tensor(f"{module}.g_idx") if f"{module}.g_idx" in self._files else None
        if order is not None and torch.equal(order.to(torch.int64), natural):
            return False
        if order is None or (groups > 1 and not bool(order.any())):  # writers leave g_idx out or all zero
            if groups > 1 and declared is not None and declared.act_order:
                found = "is missing" if order is None else "is all zero"
                raise CheckpointError(
                    f"{declared.file} says desc_act true, but {module}.g_idx, which holds the order, {found}: "
                    "correct the configuration or download the model again"
                )
            return False
        if not torch.equal(order.to(torch.int64).sort().values, natural):
            raise CheckpointError(
                f"{module}.g_idx names groups {int(order.min())} to {int(order.max())} in uneven numbers, {rows} rows "
                f"in {groups} groups of {group_size} were expected: the model is damaged, download it again"
            )
        return True

    def _report(self, zeros: ZeroPoints) -> FormatReport:
        declared = self._declared
        permuted = sum(spec.permuted for spec in self._modules.values())
        first = next(iter(self._modules))
        missing = sum(f"{module}.g_idx" not in self._files for module in self._modules)
        evidence = [
            f"{len(self._modules)} modules hold words packed along K: {shapes_of(self._files, first, _PACKED)}",
            f"g_idx is permuted in {permuted} modules and absent in {missing}",
            zeros.evidence,
        ]
        warnings = list(zeros.warnings)
        if declared is not None:
            evidence.append(f"{declared.file} says {declared.method or 'no method'}, {declared.bits} bits")
            if permuted and declared.act_order is False:
                warnings.append(
                    f"{declared.file} says desc_act false, but {permuted} modules have a permuted g_idx: it is followed"
                )
        return FormatReport(
            format="gptq",
            variant=f"v{zeros.version}",
            bits=_BITS,
            group_size=reported_group_size((spec.rows, spec.group_size) for spec in self._modules.values()),
            symmetric=zeros.symmetric,
            act_order=permuted > 0,
            evidence=tuple(evidence),
            warnings=tuple(warnings),
        )


def _module_of(name: str) -> str:
    """The module a packed tensor belongs to, or "" for any other tensor."""
    module, _, suffix = name.rpartition(".")
    return module if f".{suffix}" in _PACKED else ""
