"""The appliance's own folder: canonical weights as safetensors, so that a slow format is parsed once.

appliance.json, written last, says what each module holds. Tensors of a module, K inputs, N outputs, G groups:
    <module>.codes   uint8: up to 4 bits two rows to a byte [ceil(K/2), N] (packing.pack_nibble_rows), others [K, N]
    <module>.scales  [G, N]: fp16 where that is exact, else float32
    <module>.zeros   [G, N] uint8 for formats with integer zero points; the offsets are then -scales * zeros
    <module>.offsets [G, N]: fp16 where exact, else float32, for formats without
    <module>.perm    [K] int32 where rows are permuted
Other tensors are stored under their own names as they are. Reading back is bit-identical.
A folder is written beside its place and moved there when whole: an interrupted one is never taken for a model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.spec import LinearSpec
from appliance.quant.formats.source import check_finite, from_zeros, shapes_of
from appliance.quant.model_folder import INDEX_NAME, read_json
from appliance.quant.packing import pack_nibble_rows, unpack_nibble_rows
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

if TYPE_CHECKING:
    from appliance.quant.checkpoint import Checkpoint

MANIFEST_NAME = "appliance.json"
_VERSION = 1
_SHARD_BYTES = 1 << 30
_PARTS = (".codes", ".scales", ".zeros", ".offsets", ".perm")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


class CanonicalSource:
    """Reads a folder that `save_canonical` wrote. Raises CheckpointError when the manifest and the tensors disagree."""

    def __init__(self, files: TensorFiles, manifest: dict[str, Any]) -> None:
        if manifest.get("version") != _VERSION:
            raise UnsupportedModelError(
                f"{MANIFEST_NAME} has version {manifest.get('version')!r}, {_VERSION} is read: convert the model again"
            )
        self._files = files
        try:
            self._modules: dict[str, dict[str, int]] = {
                name: {key: int(entry[key]) for key in ("bits", "rows", "group_size")}
                for name, entry in manifest["modules"].items()
            }
            report = manifest["report"]
            lists = {key: tuple(report.get(key, ())) for key in ("evidence", "warnings", "exceptions")}
            self.report = FormatReport(**{**report, **lists})
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise CheckpointError(f"{MANIFEST_NAME} is damaged ({error!r}): convert the model again") from error
        for module in self._modules:
            if f"{module}.codes" not in files or f"{module}.scales" not in files:
                raise CheckpointError(
                    f"{MANIFEST_NAME} names module {module}, whose tensors are missing: convert again"
                )
        self._packed = {module + part for module in self._modules for part in _PARTS}

    def plain_names(self) -> list[str]:
        return [name for name in self._files if name not in self._packed]

    def quantized_modules(self) -> list[str]:
        return list(self._modules)

    def spec(self, module: str) -> LinearSpec:
        entry = self._modules[module]
        columns = self._files.shape(f"{module}.codes")[-1]
        has_perm = f"{module}.perm" in self._files
        return LinearSpec(entry["rows"], columns, entry["bits"], entry["group_size"], has_perm)

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        entry = self._modules[module]
        bits, rows, group_size = entry["bits"], entry["rows"], entry["group_size"]
        codes = self._files.tensor(f"{module}.codes")
        scales = check_finite(self._files.tensor(f"{module}.scales"), f"{module}.scales").float()
        zeroed = f"{module}.zeros" in self._files
        shifts = self._files.tensor(f"{module}.zeros" if zeroed else f"{module}.offsets")
        if (
            group_size < 1
            or scales.shape != (-(-rows // group_size), codes.shape[-1])
            or codes.shape[0] != (-(-rows // 2) if bits <= 4 else rows)
            or shifts.shape != scales.shape
        ):
            raise CheckpointError(
                f"{shapes_of(self._files, module, _PARTS)} does not agree with {MANIFEST_NAME}, which says {entry}: "
                "convert the model again"
            )
        codes = unpack_nibble_rows(codes, rows) if bits <= 4 else codes
        perm = self._files.tensor(f"{module}.perm").long() if f"{module}.perm" in self._files else None
        if zeroed:
            return from_zeros(codes, scales, shifts, bits=bits, group_size=group_size, perm=perm)
        offsets = check_finite(shifts, f"{module}.offsets").float()
        return QuantizedWeight(codes, scales, offsets, bits, group_size, perm=perm)

    def close(self) -> None:
        self._files.close()


def save_canonical(checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Writes `checkpoint` to the new folder `folder`, at most about 1 GiB in memory at a time.

    progress: called with (parameters done, parameters in all). config.json is the checkpoint's, without its
    quantisation keys; tokenizer files are left to the caller. Raises CheckpointError when `folder` already exists
    (another process may have been quicker), and leaves nothing behind on any error.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already: remove it or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(checkpoint, partial, progress)
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be created ({error.strerror}): remove it or choose another folder"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when it was moved
    _sync(folder.parent)


def _write(checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None] | None) -> None:
    weight_map: dict[str, str] = {}
    modules: dict[str, dict[str, int]] = {}
    pending: dict[str, Tensor] = {}
    pending_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        file_name = f"weights-{len(set(weight_map.values())):05d}.safetensors"
        save_file(pending, folder / file_name)
        _sync(folder / file_name)
        weight_map.update(dict.fromkeys(pending, file_name))
        pending.clear()
        pending_bytes = 0

    names = checkpoint.names()
    for done, name in enumerate(names, 1):
        module = name.removesuffix(".weight")
        value = checkpoint.linear(module) if module != name else checkpoint.tensor(name)
        if isinstance(value, QuantizedWeight):
            modules[module] = {"bits": value.bits, "rows": value.K, "group_size": value.group_size}
            parts = {f"{module}.{part}": tensor for part, tensor in _parts(value).items()}
        else:
            parts = {name: value.contiguous()}
        pending.update(parts)
        pending_bytes += sum(tensor.nbytes for tensor in parts.values())
        if pending_bytes >= _SHARD_BYTES or done == len(names):
            flush()
        if progress is not None:
            progress(done, len(names))
    found = checkpoint.report
    report = asdict(found)
    if found.format != "canonical":
        report.update(format="canonical", variant=found.describe())
    config = {key: value for key, value in checkpoint.config.items() if key not in _QUANTIZATION_KEYS}
    _write_json(folder / INDEX_NAME, {"weight_map": weight_map})
    _write_json(folder / "config.json", config)
    _write_json(folder / MANIFEST_NAME, {"version": _VERSION, "report": report, "modules": modules})
    _sync(folder)


def _parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    codes = pack_nibble_rows(weight.codes) if weight.bits <= 4 else weight.codes.contiguous()
    parts = {"codes": codes, "scales": _exact_half(weight.scales)}
    if weight.zeros is not None:
        parts["zeros"] = weight.zeros.to(torch.uint8)
    else:
        parts["offsets"] = _exact_half(weight.offsets)
    if weight.perm is not None:
        parts["perm"] = weight.perm.to(torch.int32)
    return parts


def _exact_half(tensor: Tensor) -> Tensor:
    """`tensor` in fp16 when that loses nothing, else as it is."""
    half = tensor.to(torch.float16)
    # Compared as bits: -0.0 must stay -0.0.
    same = torch.equal(half.float().view(torch.int32), tensor.view(torch.int32))
    return half.contiguous() if same else tensor.contiguous()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Onto the disk before the rename that makes it visible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a canonical folder, None for any other folder."""
    return read_json(folder / MANIFEST_NAME) if (folder / MANIFEST_NAME).is_file() else None
