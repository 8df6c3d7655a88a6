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

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.compressed_tensors_config import CompressedConfig, WeightScheme, read_compressed_config
from appliance.quant.formats.groups import reported_group_size
from appliance.quant.formats.source import check_finite, from_zeros, shapes_of
from appliance.quant.packing import unpack_bit_string, unpack_words
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

_PACKED = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
_METHODS = (None, "compressed-tensors", "sparseml")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Module:
    rows: int
    columns: int
    bits: int
    dense: bool
    """Codes straddle words."""
    group_size: int
    permuted: bool
    symmetric: bool


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
        self._modules = {module: self._inspect(module, config) for module in modules}
        self.report = self._report(config)

    def plain_names(self) -> list[str]:
        packed = {module + suffix for module in self._modules for suffix in _PACKED}
        return [name for name in self._files if name not in packed]

    def quantized_modules(self) -> list[str]:
        return list(self._modules)

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        spec = self._modules[module]
        codes = self._unpack(f"{module}.weight_packed", spec.bits, spec.dense, 1, spec.rows).t().contiguous()
        scales = check_finite(self._files.tensor(f"{module}.weight_scale"), f"{module}.weight_scale").t()
        if spec.symmetric:
            zeros = torch.full(scales.shape, 1 << (spec.bits - 1), dtype=torch.int32)
        else:
            zeros = self._zeros(module, spec.bits, spec.dense, spec.columns).t().contiguous()
        perm = None
        if spec.permuted:
            perm = torch.argsort(self._files.tensor(f"{module}.weight_g_idx"), stable=True)
            codes = codes[perm]
        return from_zeros(codes, scales, zeros, bits=spec.bits, group_size=spec.group_size, perm=perm)

    def close(self) -> None:
        self._files.close()

    def _inspect(self, module: str, config: CompressedConfig) -> _Module:
        """Shapes, width, groups and order of one module, checked against each other and its scheme."""
        scheme = config.scheme_of(module)
        columns, rows, words, groups = self._shapes(module)
        dense = self._is_dense(module, rows, words, scheme, config)
        size = min(scheme.group_size or rows, rows)
        if groups != -(-rows // size):
            said = "strategy channel" if scheme.group_size is None else f"group_size {scheme.group_size}"
            raise CheckpointError(
                f"{config.file} says {said} for {module}, which makes {-(-rows // size)} groups of its {rows} inputs, "
                f"but {module}.weight_scale has {groups} columns: correct the configuration"
            )
        symmetric = self._is_symmetric(module, columns, groups, dense, scheme, config)
        permuted = self._is_permuted(module, rows, size, scheme, config)
        return _Module(rows, columns, scheme.bits, dense, size, permuted, symmetric)

    def _shapes(self, module: str) -> tuple[int, int, int, int]:
        """N, K, words of a row and G."""
        files = self._files
        packed, scale, shape = (module + suffix for suffix in (".weight_packed", ".weight_scale", ".weight_shape"))
        found = shapes_of(files, module, _PACKED)
        for name in (scale, shape):
            if name not in files:
                raise CheckpointError(f"{name} is missing, only {found} exists: download the model again")
        sound = (
            files.dtype(packed) == torch.int32
            and files.dtype(scale) in _FLOATS
            and files.dtype(shape) in (torch.int64, torch.int32)
            and len(files.shape(packed)) == len(files.shape(scale)) == 2
            and files.shape(shape) == (2,)
        )
        if sound:
            columns, rows = files.tensor(shape).tolist()
            if files.shape(packed)[0] == files.shape(scale)[0] == columns and rows > 0 and files.shape(scale)[1] > 0:
                return columns, rows, files.shape(packed)[1], files.shape(scale)[1]
        dtypes = ", ".join(f"{files.dtype(name)}".removeprefix("torch.") for name in (packed, scale, shape))
        values = files.tensor(shape).tolist() if files.shape(shape) == (2,) else "unknown"
        raise CheckpointError(
            f"{found} of {dtypes}, weight_shape {values}, do not belong together: weight_packed [N, words] int32, "
            f"weight_scale [N, G] of floats and weight_shape [2] of integers N, K were expected, "
            f"{files.file(packed).name} is damaged, download it again"
        )

    def _is_dense(self, module: str, rows: int, words: int, scheme: WeightScheme, config: CompressedConfig) -> bool:
        bits = scheme.bits
        dense, padded = -(-rows * bits // 32), -(-rows // (32 // bits))
        if words not in (dense, padded):
            raise CheckpointError(
                f"{config.file} says {bits} bits for {module}, which makes {dense} words of its {rows} inputs, but "
                f"{module}.weight_packed has {words} columns: correct the configuration"
            )
        if dense == padded and 32 % bits and words > 1:
            raise CheckpointError(
                f"the {rows} inputs of {module} fill {words} words of {bits}-bit codes with and without gaps, so the "
                "file's packing cannot be told: quantise again with 4 or 8 bits"
            )
        return words == dense

    def _is_symmetric(
        self, module: str, columns: int, groups: int, dense: bool, scheme: WeightScheme, config: CompressedConfig
    ) -> bool:
        files, name = self._files, f"{module}.weight_zero_point"
        if name not in files:
            if not scheme.symmetric:
                raise CheckpointError(
                    f"{config.file} says symmetric false for {module}, but {name} is missing: correct the "
                    "configuration or download the model again"
                )
            return True
        words = -(-columns * scheme.bits // 32) if dense else -(-columns // (32 // scheme.bits))
        found = (files.dtype(name), files.shape(name))
        if found not in ((torch.int32, (words, groups)), (torch.int8, (columns, groups))):
            raise CheckpointError(
                f"{name} is {found[0]} {list(found[1])}, int32 {[words, groups]} was expected from weight_packed and "
                f"weight_scale: {files.file(name).name} is damaged, download it again"
            )
        middle = 1 << (scheme.bits - 1)
        symmetric = bool((self._zeros(module, scheme.bits, dense, columns) == middle).all())
        if scheme.symmetric and not symmetric:
            raise CheckpointError(
                f"{config.file} says symmetric true for {module}, but {name} holds zero points other than {middle}: "
                "correct the configuration"
            )
        return symmetric

    def _is_permuted(
        self, module: str, rows: int, group_size: int, scheme: WeightScheme, config: CompressedConfig
    ) -> bool:
        """Whether inputs are grouped by a permutation: decided by weight_g_idx, never by actorder."""
        files, name = self._files, f"{module}.weight_g_idx"
        natural = torch.arange(rows) // group_size
        if name not in files:
            if scheme.act_order and natural[-1] > 0:
                raise CheckpointError(
                    f"{config.file} says actorder 'group' for {module}, but {name}, which holds the order, is missing: "
                    "correct the configuration or download the model again"
                )
            return False
        if files.shape(name) != (rows,) or files.dtype(name) not in (torch.int32, torch.int64):
            raise CheckpointError(
                f"{name} is {files.dtype(name)} {list(files.shape(name))}, int32 {[rows]} was expected: "
                f"{files.file(name).name} is damaged, download it again"
            )
        order = files.tensor(name).to(torch.int64)
        if torch.equal(order, natural) or bool((order == -1).all()):
            return False
        if not torch.equal(order.sort().values, natural):
            raise CheckpointError(
                f"{name} names groups {int(order.min())} to {int(order.max())} in uneven numbers, {rows} inputs in "
                f"groups of {group_size} were expected: {files.file(name).name} is damaged, download it again"
            )
        return True

    def _zeros(self, module: str, bits: int, dense: bool, columns: int) -> Tensor:
        """Zero points [N, G] as unsigned codes."""
        name = f"{module}.weight_zero_point"
        if self._files.dtype(name) == torch.int8:
            zeros = self._files.tensor(name).to(torch.int32) + (1 << (bits - 1))
            if not bool(((zeros >= 0) & (zeros < 1 << bits)).all()):
                raise CheckpointError(
                    f"{name} holds {int(zeros.max()) - (1 << (bits - 1))}, zero points of {bits} bits were expected: "
                    f"{self._files.file(name).name} is damaged, download it again"
                )
            return zeros
        return self._unpack(name, bits, dense, 0, columns)

    def _unpack(self, name: str, bits: int, dense: bool, dim: int, count: int) -> Tensor:
        """`count` codes along `dim`. Raises CheckpointError where bits past them are set: then the width is another."""
        words = self._files.tensor(name)
        codes = (unpack_bit_string if dense else unpack_words)(words, bits, dim)
        kept = codes.narrow(dim, 0, count)
        rest = codes.narrow(dim, count, codes.shape[dim] - count)
        if bool(rest.any()) or (not dense and bool((words >> bits * (32 // bits)).any())):
            raise CheckpointError(
                f"{name} has bits set after its {count} codes of {bits} bits, zeros were expected: "
                f"{self._files.file(name).name} is damaged or of another width, download it again"
            )
        return kept

    def _report(self, config: CompressedConfig) -> FormatReport:
        specs = list(self._modules.values())
        first = next(iter(self._modules))
        widths = Counter(spec.bits for spec in specs)
        permuted = sum(spec.permuted for spec in specs)
        counts = ", ".join(f"{bits}-bit in {count}" for bits, count in widths.most_common())
        return FormatReport(
            format="compressed-tensors",
            variant="pack-quantized",
            bits=widths.most_common(1)[0][0],
            group_size=reported_group_size((spec.rows, spec.group_size) for spec in specs),
            symmetric=all(spec.symmetric for spec in specs),
            act_order=permuted > 0,
            evidence=(
                f"{len(specs)} modules hold words packed along K: {shapes_of(self._files, first, _PACKED)}",
                f"widths: {counts}; weight_g_idx is permuted in {permuted} modules",
                f"{config.file} has groups {', '.join(scheme.name for scheme in config.schemes)}",
            ),
            warnings=config.warnings,
        )
