"""GGUF: llama.cpp's single-file format. Needs the `gguf` package, imported when a file is opened.

Blocks of 32 codes along K, d and m little-endian fp16 (ggml-common.h; checked against the package's own dequantiser):
    Q4_0  18 bytes  d, 16 bytes whose low nibbles are codes 0-15 and high nibbles codes 16-31    d * (code - 8)
    Q4_1  20 bytes  d, m, 16 bytes as above                                                      d * code + m
    Q8_0  34 bytes  d, 32 int8                                                                   d * code
`scale * code + offset` reproduces all three bit for bit; Q8_0 is read as unsigned codes with zero point 128.
For architecture llama the rows of attn_q and attn_k are stored interleaved for llama.cpp's rotary embedding
(convert_hf_to_gguf.py `permute`) and are put back in Hugging Face's order here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.formats.gguf_layout import check_layout
from appliance.quant.formats.gguf_metadata import config_from_metadata, hugging_face_name
from appliance.quant.formats.source import check_finite, from_zeros
from appliance.quant.model_config import check_model_config
from appliance.quant.report import FormatReport
from appliance.quant.weight import QuantizedWeight

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

GROUP_SIZE = 32
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_PLAIN = ("F32", "F16", "BF16")
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True, slots=True)
class _Entry:
    tensor: ReaderTensor
    type: str
    row_order: Tensor | None
    """int64 [N]: the stored row of each row in Hugging Face's order."""


class GgufSource:
    """Reads the tensors of an open GGUF file under Hugging Face's names."""

    def __init__(self, entries: dict[str, _Entry]) -> None:
        self._entries = entries
        modules = [self._entries[f"{module}.weight"] for module in self.quantized_modules()]
        sizes = Counter[str]()
        for entry in modules:
            sizes[entry.type] += int(entry.tensor.n_elements)
        counts = Counter(entry.type for entry in entries.values())
        evidence = ("tensors by type: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()),)
        main = sizes.most_common(1)[0][0] if sizes else counts.most_common(1)[0][0]
        self.report = FormatReport(
            format="gguf",
            variant=main,
            bits=_BITS.get(main, 0),
            group_size=GROUP_SIZE if sizes else 0,
            symmetric=main != "Q4_1" if sizes else None,
            act_order=False,
            evidence=evidence,
        )

    def plain_names(self) -> list[str]:
        return [name for name, entry in self._entries.items() if entry.type in _PLAIN]

    def quantized_modules(self) -> list[str]:
        return [name.removesuffix(".weight") for name, entry in self._entries.items() if entry.type not in _PLAIN]

    def tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        data = torch.from_numpy(np.array(entry.tensor.data))  # a copy: the map is read-only
        if entry.type == "BF16":
            data = data.view(torch.bfloat16)
        return data if entry.row_order is None else data[entry.row_order]

    def quantized(self, module: str) -> QuantizedWeight:
        name = f"{module}.weight"
        entry = self._entries[name]
        data: npt.NDArray[np.uint8] = np.array(entry.tensor.data)
        if entry.row_order is not None:
            data = data[entry.row_order.numpy()]
        blocks = data.reshape(data.shape[0], -1, _BLOCK_BYTES[entry.type])
        scales = check_finite(_halves(blocks, 0), name)
        if entry.type == "Q8_0":
            return from_zeros(
                _codes(blocks[:, :, 2:] ^ np.uint8(0x80)),  # two's complement c to c + 128
                scales,
                torch.full(scales.shape, 128, dtype=torch.int32),
                bits=8,
                group_size=GROUP_SIZE,
            )
        nibbles = blocks[:, :, -16:]
        codes = _codes(np.concatenate([nibbles & 15, nibbles >> 4], axis=2))
        if entry.type == "Q4_0":
            zeros = torch.full(scales.shape, 8, dtype=torch.int32)
            return from_zeros(codes, scales, zeros, bits=4, group_size=GROUP_SIZE)
        offsets = check_finite(_halves(blocks, 2), name)
        return QuantizedWeight(codes=codes, scales=scales, offsets=offsets, bits=4, group_size=GROUP_SIZE)

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
    config = config_from_metadata(metadata, shapes)
    check_model_config(config)
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    entries = {}
    for name, tensor in tensors.items():
        kind = tensor.tensor_type.name
        if kind not in _PLAIN and (kind not in _BLOCK_BYTES or len(shapes[name]) != 2):
            raise UnsupportedModelError(
                f"{path.name}: tensor {name} is {kind} {list(shapes[name])}, supported are matrices of "
                f"{', '.join(_BLOCK_BYTES)} and {', '.join(_PLAIN)}: use another file of the model"
            )
        hf_name = hugging_face_name(name)
        module = ".".join(hf_name.split(".")[-3:-1])
        order = None
        if config["model_type"] == "llama" and module in _ROTATED:
            rows = heads[module] * config["head_dim"]
            if shapes[name][0] != rows:
                raise CheckpointError(
                    f"{path.name}: tensor {name} has {shapes[name][0]} rows, {heads[module]} heads of "
                    f"{config['head_dim']} make {rows}: the file is damaged, download it again"
                )
            order = torch.arange(rows).view(heads[module], -1, 2).transpose(1, 2).reshape(-1)
        entries[hf_name] = _Entry(tensor, kind, order)
    return GgufSource(entries), config


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


def _halves(blocks: npt.NDArray[np.uint8], start: int) -> Tensor:
    """fp16 at byte `start` of blocks [N, G, bytes], as float32 [G, N]."""
    halves = np.ascontiguousarray(blocks[:, :, start : start + 2]).view("<f2")[:, :, 0]
    return torch.from_numpy(np.ascontiguousarray(halves.T)).float()


def _codes(codes: npt.NDArray[np.uint8]) -> Tensor:
    """uint8 codes [N, G, 32] as [K, N]."""
    return torch.from_numpy(np.ascontiguousarray(codes.reshape(codes.shape[0], -1).T))
