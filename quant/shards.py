"""Writing many tensors as safetensors of limited size, named as Hugging Face names them. It knows no format."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from appliance.quant.model_folder import INDEX_NAME

SHARD_BYTES = 4 << 30


class ShardWriter:
    """Takes a model's tensors one by one, and holds no more of them than one file's worth.

    `close` names the files: model.safetensors, or model-00001-of-0000n.safetensors and an index.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._total_bytes += tensor.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file_name = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._path(index).rename(self._folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_NAME).write_text(json.dumps(content, indent=1))

    def _path(self, index: int) -> Path:
        return self._folder / f"shard-{index}.partial"

    def _flush(self) -> None:
        save_file(self._pending, self._path(len(self._shards)), metadata={"format": "pt"})  # transformers wants it
        self._shards.append(list(self._pending))
        self._pending.clear()
