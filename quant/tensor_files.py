"""One or more safetensors files as one set of named tensors, memory-mapped. It knows no quantisation format.

Layout of a safetensors file: 8 bytes little-endian header length, a JSON header, then the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def torch_dtype(found: str, name: str, file: str) -> torch.dtype:
    """The dtype of safetensors' word for it. Raises UnsupportedModelError naming tensor and file for others."""
    if found not in _DTYPES:
        raise UnsupportedModelError(
            f"tensor {name} in {file} has dtype {found}, which is not served: "
            "use a checkpoint with 16- or 32-bit floats, GPTQ, AWQ or GGUF"
        )
    return _DTYPES[found]


class TensorFiles:
    """Named tensors of safetensors files; tensors are views of the mapped files until they are used.

    files: the paths. expected: tensor name -> file name, of an index, or None for a single file.
    Raises CheckpointError naming the file for damage or a tensor that is not where the index says.
    """

    has_data = True
    """False where only headers are there: tensors have shapes and dtypes, and what they hold must be taken on trust."""

    def __init__(self, files: list[Path], expected: dict[str, str] | None = None) -> None:
        self._files: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        for path in files:
            handle = _open(path)
            self._handles[path] = handle
            for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                if expected is None or expected.get(name, path.name) == path.name:
                    self._files[name] = path
        for name, file_name in (expected or {}).items():
            if name not in self._files:
                raise CheckpointError(
                    f"the index places tensor {name} in {file_name}, which does not hold it: download the model again"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def file(self, name: str) -> Path:
        """The file that holds `name`."""
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises UnsupportedModelError naming the tensor for a dtype that is not served (8-bit floats)."""
        return torch_dtype(self.stored_dtype(name), name, self._files[name].name)

    def stored_dtype(self, name: str) -> str:
        """The file's own word for the dtype of `name`, served or not: F8_E4M3, U32..."""
        dtype: str = self._handle(name).get_slice(name).get_dtype()
        return dtype

    def tensor(self, name: str) -> Tensor:
        """Raises CheckpointError when there is no such tensor."""
        tensor: Tensor = self._handle(name).get_tensor(name)
        return tensor

    def close(self) -> None:
        """Lets the files go; tensors handed out stay valid."""
        for handle in self._handles.values():
            handle.__exit__(None, None, None)
        self._handles.clear()

    def _handle(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is not in the checkpoint, which may be incomplete: download it again")
        return self._handles[self._files[name]]


def _open(path: Path) -> Any:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
    if size < 8 or header_length > size - 8:
        raise CheckpointError(
            f"{path.name} is not a whole safetensors file: its header should take {header_length} bytes after the "
            f"first 8, the file has {size} bytes: download it again"
        )
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} is damaged or cut short at {size} bytes ({error}); a safetensors file whose header covers "
            "all of its data was expected: download it again"
        ) from error
