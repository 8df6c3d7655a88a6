"""Corruptions of a model folder: truncated, of other shapes and dtypes, contradicted, ill-formed, leading elsewhere."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

Files = dict[str, bytes]
Damage = Callable[[Path], object]
Case = tuple[str, Damage]

INDEX = "model.safetensors.index.json"
SAME_SIZE = {"I32": ("F32", "U32"), "F32": ("I32",), "F16": ("I16", "U16"), "I64": ("F64", "U64")}


def edited(name: str, edit: Callable[..., bytes], *arguments: Any) -> Damage:
    """The file `name` becomes `edit(its content, *arguments)`."""
    return lambda folder: (folder / name).write_bytes(edit((folder / name).read_bytes(), *arguments))


def cut(content: bytes, size: int) -> bytes:
    return content[:size]


def truncations(files: Files) -> Iterator[Case]:
    for name, content in files.items():
        for size in {len(content) * tenth // 10 for tenth in range(10)} | {4, 8, len(content) - 1}:
            yield f"{name} cut to {size} bytes", edited(name, cut, size)
        yield f"{name} is missing", _removing(name)


def _removing(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _with_entry(content: bytes, tensor: str, key: str, value: Any) -> bytes:
    """A safetensors file whose header says `value` for `key` of `tensor`."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[tensor][key] = value
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def header_of(content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def headers(shard: str, content: bytes) -> Iterator[Case]:
    """Shapes swapped, flattened and beyond the file, dtypes of the same size, data that lies elsewhere."""
    for name, entry in header_of(content).items():
        shape = entry["shape"]
        shapes = {"has a further dimension": [1, *shape], "claims more than there is": [1 << 40, *shape[1:]]}
        if len(shape) == 2:
            shapes |= {
                "has its shape swapped": shape[::-1],
                "is flat": [shape[0] * shape[1]],
                "is half as wide": [shape[0] * 2, shape[1] // 2],
            }
        for what, other in shapes.items():
            yield f"{name} {what}", edited(shard, _with_entry, name, "shape", other)
        for dtype in (*SAME_SIZE[entry["dtype"]], "F8_E4M3", "X"):
            yield f"{name} is said to be {dtype}", edited(shard, _with_entry, name, "dtype", dtype)
        offsets = [offset + 4 for offset in entry["data_offsets"]]
        yield f"{name} lies elsewhere", edited(shard, _with_entry, name, "data_offsets", offsets)


def _with_tensor(content: bytes, name: str, tensor: Tensor | None) -> bytes:
    """A safetensors file with another tensor `name`, or without it."""
    tensors = load(content)
    del tensors[name]
    return save(tensors if tensor is None else tensors | {name: tensor.contiguous()})


def tensors(shard: str, content: bytes) -> Iterator[Case]:
    """Tensors of other sizes, dtypes and values in a file that is sound in itself."""
    for name, tensor in load(content).items():
        others: dict[str, Tensor | None] = {
            "gone": None,
            "one row short": tensor[:-1],
            "one row long": torch.cat([tensor, tensor[-1:]]),
            "empty": tensor[:0],
            "int16": tensor.to(torch.int16),
            "float64": tensor.to(torch.float64),
        }
        if tensor.ndim == 2:
            others |= {"one column short": tensor[:, :-1], "transposed": tensor.t()}
        if tensor.is_floating_point():
            others |= {"NaN": torch.full_like(tensor, torch.nan), "infinite": torch.full_like(tensor, torch.inf)}
        for what, other in others.items():
            yield f"{name} is {what}", edited(shard, _with_tensor, name, other)


def with_quantization(content: bytes, keys: dict[str, Any]) -> bytes:
    config = json.loads(content)
    config["quantization_config"] |= keys
    return json.dumps(config).encode()


def _joined(content: bytes, text: bytes) -> bytes:
    """A JSON object with the pairs `text` at its end."""
    return content.rstrip()[:-1] + b", " + text + b"}"


def json_damage(files: Files) -> Iterator[Case]:
    for name in ("config.json", INDEX):
        content = files[name]
        texts = {
            "has a comma too many": _joined(content, b""),
            "gives keys twice": _joined(content, b'"hidden_size": 64, "quantization_config": {}, "weight_map": {}'),
            "gives every key twice with one value": _joined(content, content[1:-1]),
            "is UTF-16": content.decode().encode("utf-16"),
            "begins with a byte order mark": b"\xef\xbb\xbf" + content,
            "is not UTF-8": content.replace(b"model", b"mod\xffl"),
            "is nested without end": b'{"a":' * 100_000,
            "is a list": b"[" + content + b"]",
            "is two objects": content + content,
            "holds a number without end": _joined(content, b'"vocab_size": ' + b"9" * 5000),
            "holds null bytes": content.replace(b" ", b"\0"),
        }
        for what, text in texts.items():
            yield f"{name} {what}", edited(name, _replaced, text)


def _replaced(_: bytes, text: bytes) -> bytes:
    return text


def paths(shards: tuple[str, str]) -> Iterator[Case]:
    """Entries of the index and links that lead elsewhere."""
    for shard in (f"../{shards[0]}", "/etc/passwd", "..", "", f"a/../{shards[0]}", f"{shards[0]}/", shards[1], 1, None):
        yield f"the index names {shard!r}", edited(INDEX, _with_shard, shard)
    for name in (shards[0], INDEX, "config.json"):
        for target in ("nowhere", name, ".", "/dev/zero", "/etc/passwd", shards[1]):
            yield f"{name} is a link to {target}", _instead(name, "symlink", target)
        yield f"{name} is a pipe", _instead(name, "pipe")
        yield f"{name} is a folder", _instead(name, "folder")


def _with_shard(content: bytes, shard: Any) -> bytes:
    index = json.loads(content)
    index["weight_map"][next(iter(index["weight_map"]))] = shard
    return json.dumps(index).encode()


def _instead(name: str, kind: str, target: str = "") -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.unlink()
        if kind == "symlink":
            path.symlink_to(target)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()

    return damage


def random_bytes(name: str, first: int, last: int, count: int, seed: int = 0) -> Iterator[Case]:
    """Two random bytes among those from `first` to `last` of a file."""
    generator = random.Random(seed)
    for _ in range(count):
        places = [(generator.randrange(first, last), generator.randrange(256)) for _ in range(2)]
        yield f"{name} with bytes {places}", edited(name, _with_bytes, places)


def _with_bytes(content: bytes, places: list[tuple[int, int]]) -> bytes:
    damaged = bytearray(content)
    for place, value in places:
        damaged[place] = value
    return bytes(damaged)


def folder_damage(files: Files, shards: tuple[str, str]) -> Iterator[Case]:
    """All of the above that need not know the format."""
    content = files[shards[0]]
    header_end = 8 + int.from_bytes(content[:8], "little")
    yield from itertools.chain(
        truncations(files),
        headers(shards[0], content),
        tensors(shards[0], content),
        json_damage(files),
        paths(shards),
        random_bytes(shards[0], 0, header_end, 60),
        random_bytes("config.json", 0, len(files["config.json"]), 60),
        random_bytes(INDEX, 0, len(files[INDEX]), 60),
    )
