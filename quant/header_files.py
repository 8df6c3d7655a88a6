"""The headers of safetensors files without their data: what can be known of a model before it is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.quant.tensor_files import TensorFiles, torch_dtype

Header = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> dtype in safetensors' words and shape."""


class HeaderFiles(TensorFiles):
    """`TensorFiles` whose tensors have a shape and a dtype and no data (torch's meta device)."""

    has_data = False

    def __init__(self, headers: Mapping[str, Header], expected: Mapping[str, str] | None = None) -> None:
        """headers: of each file. expected: tensor name -> file name, of an index; stray tensors are left out.

        Raises CheckpointError for a tensor that is not where the index says.
        """
        self._entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._files: dict[str, Path] = {}
        for file, header in headers.items():
            for name, entry in header.items():
                if expected is None or expected.get(name, file) == file:
                    self._entries[name], self._files[name] = entry, Path(file)
        for name, file in (expected or {}).items():
            if name not in self._files:
                raise CheckpointError(
                    f"the index places tensor {name} in {file}, which does not hold it: the model is incomplete"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1]

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self.stored_dtype(name), name, self._files[name].name)

    def stored_dtype(self, name: str) -> str:
        return self._entry(name)[0]

    def tensor(self, name: str) -> Tensor:
        return torch.empty(self.shape(name), dtype=self.dtype(name), device="meta")

    def close(self) -> None:
        pass

    def _entry(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self._entries:
            raise CheckpointError(f"tensor {name} is not in the checkpoint, which may be incomplete")
        return self._entries[name]
