"""GGUF: llama.cpp's single-file format. Needs the `gguf` package, imported when a file is opened.

Matrices of the types of gguf_blocks.py stay quantised, each with its own bits and groups: most files mix types.
For architectures llama and mistral3 the rows of attn_q and attn_k are stored interleaved for llama.cpp's rotary
embedding (convert_hf_to_gguf.py `permute`) and are put back in Hugging Face's order here. A layer's experts are one
tensor [E, N, K], read as E matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.formats.gguf_blocks import BLOCK_TYPES, read_blocks
from appliance.quant.formats.gguf_layout import check_layout
from appliance.quant.formats.gguf_metadata import EVERY_EXPERT, config_from_metadata, hugging_face_name
from appliance.quant.formats.gguf_rope import ROPE_FACTORS
from appliance.quant.model_config import check_model_config
from appliance.quant.report import FormatReport
from appliance.quant.weight import QuantizedWeight

if TYPE_CHECKING:
    from gguf import GGUFReader

_PLAIN = ("F32", "F16", "BF16")
# Which file of a model to use instead of one with types that are not read, by their beginnings. Codes of the IQ types
# are looked up in tables: no scale and offset gives their values.
_INSTEAD = {"IQ1": "Q2_K", "IQ2": "Q2_K", "IQ3": "Q3_K_M", "TQ": "Q2_K"}
_INTERLEAVED = ("llama", "mistral", "mixtral")
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True, slots=True)
class _Entry:
    data: npt.NDArray[Any]
    """As in the file: numbers of `shape`, or rows of bytes."""
    shape: tuple[int, ...]
    type: str
    row_order: Tensor | None
    """int64 [N]: the stored row of each row in Hugging Face's order."""


class GgufSource:
    """Reads the tensors of an open GGUF file under Hugging Face's names."""

    def __init__(self, entries: dict[str, _Entry], counts: Counter[str]) -> None:
        """counts: tensors of the file of each type."""
        self._entries = entries
        self.report = _report(entries, counts)

    def plain_names(self) -> list[str]:
        return [name for name, entry in self._entries.items() if entry.type in _PLAIN]

    def quantized_modules(self) -> list[str]:
        return [name.removesuffix(".weight") for name, entry in self._entries.items() if entry.type not in _PLAIN]

    def tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        data = torch.from_numpy(np.array(entry.data))  # a copy: the map is read-only
        if entry.type == "BF16":
            data = data.view(torch.bfloat16)
        return data if entry.row_order is None else data[entry.row_order]

    def quantized(self, module: str) -> QuantizedWeight:
        name = f"{module}.weight"
        entry = self._entries[name]
        data = np.array(entry.data)
        if entry.row_order is not None:
            data = data[entry.row_order.numpy()]
        return read_blocks(BLOCK_TYPES[entry.type], data, name)

    def close(self) -> None:
        self._entries.clear()


def open_gguf(path: Path) -> tuple[GgufSource, dict[str, Any]]:
    """The reader of a file and its configuration in Hugging Face's form.

    Raises CheckpointError for a damaged file, UnsupportedModelError naming a tensor type or architecture not served.
    """
    reader = _read(path)
    check_layout(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def metadata(key: str) -> Any:
        field = reader.fields.get(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path.name}: metadata {key} is not UTF-8: download it again") from error

    # gguf lists a shape fastest dimension first: (K, N).
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    factors = tensors.pop(ROPE_FACTORS, None)
    if factors is not None and factors.tensor_type.name != "F32":
        raise CheckpointError(
            f"{path.name}: tensor {ROPE_FACTORS} is {factors.tensor_type.name}, F32 was expected: download it again"
        )
    config = config_from_metadata(metadata, shapes, None if factors is None else factors.data.tolist())
    check_model_config(config)
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    entries = {}
    for name, tensor in tensors.items():
        kind = tensor.tensor_type.name
        hf_name = hugging_face_name(name)
        is_stack = EVERY_EXPERT in hf_name
        is_shaped = len(shapes[name]) == 2 + is_stack or (kind in _PLAIN and not is_stack)
        if kind not in (*_PLAIN, *BLOCK_TYPES) or not is_shaped:
            nearest = next((file for start, file in _INSTEAD.items() if kind.startswith(start)), "Q4_K_M")
            better = f"the {nearest}" if is_shaped else "another"
            raise UnsupportedModelError(
                f"{path.name}: tensor {name} is {kind} {list(shapes[name])}, supported are matrices of "
                f"{', '.join(BLOCK_TYPES)} and {', '.join(_PLAIN)}: use {better} file of the model"
            )
        if is_stack:
            for expert, matrix in enumerate(tensor.data):
                entries[hf_name.replace(EVERY_EXPERT, str(expert))] = _Entry(matrix, shapes[name][1:], kind, None)
            continue
        module = ".".join(hf_name.split(".")[-3:-1])
        order = None
        if config["model_type"] in _INTERLEAVED and module in _ROTATED:
            rows = heads[module] * config["head_dim"]
            if shapes[name][0] != rows:
                raise CheckpointError(
                    f"{path.name}: tensor {name} has {shapes[name][0]} rows, {heads[module]} heads of "
                    f"{config['head_dim']} make {rows}: the file is damaged, download it again"
                )
            order = torch.arange(rows).view(heads[module], -1, 2).transpose(1, 2).reshape(-1)
        data, shape = tensor.data, shapes[name]
        if module == "mlp.shared_expert_gate" and len(shape) == 1:  # a matrix of one row
            data, shape = data.reshape(1, -1), (1, *shape)
        entries[hf_name] = _Entry(data, shape, kind, order)
    return GgufSource(entries, Counter(tensor.tensor_type.name for tensor in tensors.values())), config


def _report(entries: dict[str, _Entry], counts: Counter[str]) -> FormatReport:
    weights, layers = Counter[str](), Counter[str]()
    for name, entry in entries.items():
        weights[entry.type] += math.prod(entry.shape)
        if name.startswith("model.layers.") and len(entry.shape) == 2:
            layers[entry.type] += math.prod(entry.shape)
    types = [kind for kind, _ in layers.most_common()]
    # The embedding's type is not the model's, unless nothing else is quantised.
    candidates = [*types, *(kind for kind, _ in weights.most_common())]
    main = next((kind for kind in candidates if kind in BLOCK_TYPES), candidates[0])
    block = BLOCK_TYPES.get(main)
    return FormatReport(
        format="gguf",
        variant="+".join(dict.fromkeys([main, *types])),
        bits=block.bits if block else 0,
        group_size=block.group_size if block else 0,
        symmetric=all(BLOCK_TYPES[kind].is_symmetric for kind in counts if kind in BLOCK_TYPES) if block else None,
        act_order=False,
        evidence=("tensors by type: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()),),
    )


def _read(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedModelError(f"reading {path.name} needs the gguf package: pip install gguf") from error

    class BoundedReader(GGUFReader):
        """The package's reader takes a read past the end as empty, so a huge count in a damaged file never ends."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)}, before what its header promises")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = BoundedReader(path)
    except Exception as error:  # damaged bytes surface as many types: Value, Key, Index, Overflow, Recursion...
        raise CheckpointError(
            f"{path.name} is not a whole GGUF file ({error}), {path.stat().st_size} bytes were found: download it again"
        ) from error
    if reader.byte_order == "S":
        raise UnsupportedModelError(f"{path.name} is a GGUF file of big-endian bytes, little-endian is supported")
    return reader
