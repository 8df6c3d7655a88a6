"""compressed-tensors, `pack-quantized`: integer weights of 2 to 8 bits whose inputs are not quantised.

Layout (compressed-tensors compressors/pack_quantized), K inputs, N outputs, G = ceil(K / group_size), B bits:
    weight_packed [N, words] int32: codes along K, least significant first. Packed without gaps, words = ceil(K*B/32);
        before version 0.18 a code of 3, 5, 6 or 7 bits never straddled, words = ceil(K / (32 // B)).
    weight_scale [N, G] float, G = 1 for strategy channel.
    weight_zero_point int32 [ceil(N*B/32), G], packed the same way along N, only of asymmetric weights; int8 [N, G],
        signed and unpacked, in old files.
    weight_shape [2]: N, K.    weight_g_idx [K] int32: the group of each input of act-order; -1 throughout: none.
    Packed codes and zero points are the signed ones plus 2**(B-1).
    W[n, k] = weight_scale[n, g(k)] * (code[n, k] - zero[n, g(k)])
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.kernels.spec import LinearSpec
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.compressed_tensors_config import CompressedConfig, WeightScheme, read_compressed_config
from appliance.quant.formats.compressed_tensors_words import PackedLayout, read_codes, read_zeros, words_for
from appliance.quant.formats.groups import reported_group_size
from appliance.quant.formats.source import check_finite, from_zeros, shapes_of
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

_PACKED = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
_METHODS = (None, "compressed-tensors", "sparseml")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Module:
    layout: PackedLayout
    group_size: int
    symmetric: bool
    permuted: bool


class CompressedTensorsSource:
    """Reads pack-quantized modules. Raises CheckpointError for contradictions, UnsupportedModelError for schemes."""

    def __init__(self, files: TensorFiles, modules: list[str], declared: DeclaredQuantization | None) -> None:
        self._files = files
        if declared is None or declared.method not in _METHODS:
            said = "nothing says its quantisation" if declared is None else f"{declared.file} says {declared.method}"
            raise CheckpointError(
                f"{files.file(f'{modules[0]}.weight_packed').name} holds {modules[0]}.weight_packed, but {said}: "
                "quantization_config of config.json must be that of compressed-tensors, download the model again"
            )
        config = read_compressed_config(declared.file, declared.raw)
        self._modules = {module: self._inspect(module, config.scheme_of(module)) for module in modules}
        self.report = self._report(config)

    def plain_names(self) -> list[str]:
        packed = {module + suffix for module in self._modules for suffix in _PACKED}
        return [name for name in self._files if name not in packed]

    def quantized_modules(self) -> list[str]:
        return list(self._modules)

    def spec(self, module: str) -> LinearSpec:
        found = self._modules[module]
        layout = found.layout
        return LinearSpec(layout.rows, layout.columns, layout.bits, found.group_size, found.permuted)

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        spec = self._modules[module]
        codes = read_codes(self._files, spec.layout).t().contiguous()
        scales = check_finite(self._files.tensor(f"{module}.weight_scale"), f"{module}.weight_scale").t()
        if spec.symmetric:
            zeros = torch.full(scales.shape, spec.layout.middle, dtype=torch.int32)
        else:
            zeros = read_zeros(self._files, spec.layout).t().contiguous()
        perm = None
        if spec.permuted:
            perm = torch.argsort(self._files.tensor(f"{module}.weight_g_idx"), stable=True)
            codes = codes[perm]
        return from_zeros(codes, scales, zeros, bits=spec.layout.bits, group_size=spec.group_size, perm=perm)

    def close(self) -> None:
        self._files.close()

    def _inspect(self, module: str, scheme: WeightScheme) -> _Module:
        """Shapes, width, groups and order of one module, checked against each other and its scheme."""
        layout = self._layout(module, scheme)
        size = min(scheme.group_size or layout.rows, layout.rows)
        groups = -(-layout.rows // size)
        if layout.groups != groups:
            said = "strategy channel" if scheme.group_size is None else f"group_size {scheme.group_size}"
            raise CheckpointError(
                f"{scheme.file} says {said} for {module}, which makes {groups} groups of its {layout.rows} inputs, "
                f"but {module}.weight_scale has {layout.groups} columns: correct the configuration"
            )
        return _Module(layout, size, self._is_symmetric(layout, scheme), self._is_permuted(layout, size, scheme))

    def _layout(self, module: str, scheme: WeightScheme) -> PackedLayout:
        bits = scheme.bits
        rows, columns, words, groups = self._shapes(module, scheme)
        dense, padded = words_for(rows, bits, True), words_for(rows, bits, False)
        if words not in (dense, padded):
            raise CheckpointError(
                f"{scheme.file} says {bits} bits for {module}, which makes {dense} words of its {rows} inputs, but "
                f"{module}.weight_packed has {words} columns: correct the configuration"
            )
        if dense == padded and 32 % bits and words > 1:
            raise CheckpointError(
                f"the {rows} inputs of {module} fill {words} words of {bits}-bit codes with and without gaps, so the "
                "file's packing cannot be told: quantise again with 4 or 8 bits"
            )
        return PackedLayout(module, rows, columns, groups, bits, words == dense)

    def _shapes(self, module: str, scheme: WeightScheme) -> tuple[int, int, int, int]:
        """K, N, words of a row and G. Headers alone do not tell K: then the last group, or word, counts as full."""
        files = self._files
        packed, scale, shape = (module + suffix for suffix in (".weight_packed", ".weight_scale", ".weight_shape"))
        found = shapes_of(files, module, _PACKED)
        for name in (scale, shape):
            if name not in files:
                raise CheckpointError(f"{name} is missing, only {found} exists: download the model again")
        values: list[Any] = []
        if not files.has_data:
            whole = files.shape(packed)[-1] * 32 // scheme.bits
            rows = files.shape(scale)[-1] * scheme.group_size if scheme.group_size else whole
            values = [files.shape(packed)[0], rows]
        elif files.shape(shape) == (2,):
            values = files.tensor(shape).tolist()
        if (
            files.dtype(packed) == torch.int32
            and files.dtype(scale) in _FLOATS
            and files.dtype(shape) in (torch.int64, torch.int32)
            and len(files.shape(packed)) == len(files.shape(scale)) == 2
            and len(values) == 2
            and files.shape(packed)[0] == files.shape(scale)[0] == values[0]
            and values[1] > 0
        ):
            return values[1], values[0], files.shape(packed)[1], files.shape(scale)[1]
        dtypes = ", ".join(f"{files.dtype(name)}".removeprefix("torch.") for name in (packed, scale, shape))
        raise CheckpointError(
            f"{found} of {dtypes}, weight_shape {values or 'unknown'}, do not belong together: weight_packed int32 "
            "[N, words], weight_scale [N, G] of floats and weight_shape [2] of integers N, K were expected, "
            f"{files.file(packed).name} is damaged, download it again"
        )

    def _is_symmetric(self, layout: PackedLayout, scheme: WeightScheme) -> bool:
        """Whether all zero points are the middle code: decided by them; a scheme that says otherwise is refused."""
        name = f"{layout.module}.weight_zero_point"
        if name not in self._files:
            if not scheme.symmetric:
                raise CheckpointError(
                    f"{scheme.file} says symmetric false for {layout.module}, but {name} is missing: correct the "
                    "configuration or download the model again"
                )
            return True
        if not self._files.has_data:
            return scheme.symmetric
        symmetric = bool((read_zeros(self._files, layout) == layout.middle).all())
        if scheme.symmetric and not symmetric:
            raise CheckpointError(
                f"{scheme.file} says symmetric true for {layout.module}, but {name} holds zero points other than "
                f"{layout.middle}: correct the configuration"
            )
        return symmetric

    def _is_permuted(self, layout: PackedLayout, group_size: int, scheme: WeightScheme) -> bool:
        """Whether inputs are grouped by a permutation: decided by weight_g_idx, never by actorder."""
        files, name, rows = self._files, f"{layout.module}.weight_g_idx", layout.rows
        if name not in files:
            if scheme.act_order and layout.groups > 1:
                raise CheckpointError(
                    f"{scheme.file} says actorder 'group' for {layout.module}, but {name}, which holds the order, is "
                    "missing: correct the configuration or download the model again"
                )
            return False
        if files.shape(name) != (rows,) or files.dtype(name) not in (torch.int32, torch.int64):
            raise CheckpointError(
                f"{name} is {files.dtype(name)} {list(files.shape(name))}, int32 {[rows]} was expected: "
                f"{files.file(name).name} is damaged, download it again"
            )
        if not files.has_data:
            return scheme.act_order
        order, natural = files.tensor(name).to(torch.int64), torch.arange(rows) // group_size
        if torch.equal(order, natural) or bool((order == -1).all()):
            return False
        if not torch.equal(order.sort().values, natural):
            raise CheckpointError(
                f"{name} names groups {int(order.min())} to {int(order.max())} in uneven numbers, {rows} inputs in "
                f"groups of {group_size} were expected: {files.file(name).name} is damaged, download it again"
            )
        return True

    def _report(self, config: CompressedConfig) -> FormatReport:
        specs = list(self._modules.values())
        first = next(iter(self._modules))
        widths = Counter(spec.layout.bits for spec in specs)
        permuted = sum(spec.permuted for spec in specs)
        counts = ", ".join(f"{bits}-bit in {count}" for bits, count in widths.most_common())
        return FormatReport(
            format="compressed-tensors",
            variant="pack-quantized",
            bits=widths.most_common(1)[0][0],
            group_size=reported_group_size((spec.layout.rows, spec.group_size) for spec in specs),
            symmetric=all(spec.symmetric for spec in specs),
            act_order=permuted > 0,
            evidence=(
                f"{len(specs)} modules hold words packed along K: {shapes_of(self._files, first, _PACKED)}",
                f"widths: {counts}; weight_g_idx is permuted in {permuted} modules",
                f"{config.file} has groups {', '.join(scheme.name for scheme in config.schemes)}",
            ),
            warnings=config.warnings,
        )
