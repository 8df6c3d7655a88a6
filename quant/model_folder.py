"""Finding and reading the files of a model folder safely. It knows names and JSON, not tensors.

Nothing outside the folder's own listing is opened, and nothing in it is ever executed: pickled weights are refused.
Symbolic links are followed, since the Hugging Face cache keeps its files as links to ../../blobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from appliance.errors import CheckpointError, UnsupportedModelError

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = {
    "*.onnx": "ONNX",
    "onnx/*.onnx": "ONNX",
    "openvino_model.xml": "OpenVINO",
    "*.h5": "TensorFlow or Keras",
    "*.msgpack": "Flax",
}
_MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file for anything else, and for a key with
    two values."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing from {path.parent}: download the model again")
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path.name} has {size} bytes, more than the {_MAX_JSON_BYTES} allowed for JSON")
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_unambiguous)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): correct it or download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, an object was expected: download it again")
    return value


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`. Raises ValueError where a key is given twice with two values."""
    value = dict(pairs)
    for key, first in pairs:
        if first is not value[key] and first != value[key]:
            raise ValueError(f"{key!r} is given twice, as {str(first)[:80]!r} and as {str(value[key])[:80]!r}")
    return value


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of a folder and its index's weight map (tensor -> file name), None without an index.

    An index is preferred to stray single files, then model.safetensors, then the only *.safetensors there is, then the
    one that AutoGPTQ's quantize_config.json names.
    Raises UnsupportedModelError for pickled weights and for models of other frameworks, CheckpointError for none or
    several without an index.
    """
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        index = folder / INDEX_NAME if folder / INDEX_NAME in indexes else indexes[0]
        return _indexed_files(folder, index)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if folder / "model.safetensors" in found:
        return [folder / "model.safetensors"], None
    if len(found) == 1:
        return found, None
    if folder / f"{_base_name(folder)}.safetensors" in found:
        return [folder / f"{_base_name(folder)}.safetensors"], None
    if found:
        names = ", ".join(path.name for path in found[:4])
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files ({names}) and no {INDEX_NAME}: add the index of the model"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise UnsupportedModelError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded and are never opened: "
            "convert the model to safetensors or use its GPTQ or AWQ checkpoint"
        )
    for pattern, framework in _OTHERS.items():
        for path in sorted(folder.glob(pattern)):
            raise UnsupportedModelError(
                f"{folder} holds the model as {framework} ({path.relative_to(folder)}), which is not served: "
                "use the model's safetensors, plain or GPTQ or AWQ, or its GGUF"
            )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(f"{folder} holds no safetensors but {ggufs[0]}: give the path of the .gguf file itself")
    raise CheckpointError(f"{folder} holds no weights: a *.safetensors or a .gguf file was expected")


def _base_name(folder: Path) -> object:
    path = folder / "quantize_config.json"
    return read_json(path).get("model_file_base_name") if path.is_file() else None


def _indexed_files(folder: Path, index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name} has no weight_map of tensors to files: download the model again")
    for name, shard in weight_map.items():
        # A name from a downloaded file must not lead out of its folder.
        plain = isinstance(shard, str) and shard.isprintable() and len(shard) < 256 and not set(shard) & set("/\\")
        if not plain or shard in ("", ".", ".."):
            raise CheckpointError(
                f"{index.name} places tensor {name} in {shard!r}, which is not a plain file name: "
                "do not use this model, its index is malformed or hostile"
            )
        if not shard.endswith(".safetensors"):
            raise UnsupportedModelError(
                f"{index.name} places tensor {name} in {shard!r}, only .safetensors files are read: "
                "convert the model to safetensors"
            )
    files = [folder / shard for shard in sorted(set(weight_map.values()))]
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{path.name} is missing from {folder}, {index.name} names it: download it again")
    return files, weight_map
