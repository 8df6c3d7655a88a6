"""Blocks of GGUF's tensor types: their bits on disk, and how they become a canonical weight. It knows no file.

A row of a matrix is a run of blocks along K; d, m and dmin are little-endian fp16 (ggml-common.h; every type is checked
against the `gguf` package's own dequantiser). nibbles(r), pairs(r) and bits(r) are fields of 4, 2 and 1 bits: of each
run of r bytes first all the lowest fields, then all the next.

    type  codes bytes  layout                                                                    value
    Q4_0     32    18  d, code nibbles(16)                                                       d * (code - 8)
    Q4_1     32    20  d, m, code nibbles(16)                                                    d * code + m
    Q5_0     32    22  d, fifth bits(1), code nibbles(16)                                        d * (code - 16)
    Q5_1     32    24  d, m, fifth bits(1), code nibbles(16)                                     d * code + m
    Q8_0     32    34  d, 32 int8                                                                d * code
    Q2_K    256    84  16 bytes of sc (low nibble) and mn (high), code pairs(32), d, dmin        d*sc * code - dmin*mn
    Q3_K    256   110  third bits(32), code pairs(32), 12 bytes of 16 sc, d                      d*(sc-32) * (code - 4)
    Q4_K    256   144  d, dmin, 12 bytes of 8 sc and mn, code nibbles(32)                        d*sc * code - dmin*mn
    Q5_K    256   176  d, dmin, 12 bytes of 8 sc and mn, fifth bits(32), code nibbles(32)        d*sc * code - dmin*mn
    Q6_K    256   210  code nibbles(64), upper pairs(32), 16 int8 sc, d                          d*sc * (code - 32)

Each sc, or sc and mn, serves an equal share of its block's codes. Products of fp16 and these integers are exact in
float32, so `scale * code + offset` reproduces every type bit for bit; Q8_0 is read as unsigned codes around 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from appliance.quant.formats.source import check_finite, from_zeros
from appliance.quant.weight import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of blocks [N, B, bytes]: codes [N, B, codes], scales [N, B, groups], and offsets like them or one zero point."""

    codes: Bytes
    scales: Floats
    shift: Floats | int


@dataclass(frozen=True, slots=True)
class BlockType:
    """One row of the table above; group_size: codes that share a scale."""

    bits: int
    group_size: int
    nbytes: int
    is_symmetric: bool
    """Its zero point is the middle code."""
    read: Callable[[Bytes], _Parts]


def read_blocks(kind: BlockType, rows: Bytes, name: str) -> QuantizedWeight:
    """The weight of `rows` [N, bytes of a row]. Raises CheckpointError naming `name` where a scale is not finite."""
    with np.errstate(invalid="ignore"):  # infinity times zero is refused below
        parts = kind.read(rows.reshape(rows.shape[0], -1, kind.nbytes))
    codes = _transposed(parts.codes)
    scales = check_finite(_transposed(parts.scales), name)
    if isinstance(parts.shift, int):
        zeros = torch.full(scales.shape, parts.shift, dtype=torch.int32)
        return from_zeros(codes, scales, zeros, bits=kind.bits, group_size=kind.group_size)
    offsets = check_finite(_transposed(parts.shift), name)
    return QuantizedWeight(codes, scales, offsets, kind.bits, kind.group_size)


def _q4_0(blocks: Bytes) -> _Parts:
    return _Parts(_fields(blocks[..., 2:], 4, 16), _half(blocks, 0), 8)


def _q4_1(blocks: Bytes) -> _Parts:
    return _Parts(_fields(blocks[..., 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> _Parts:
    codes = _fields(blocks[..., 6:], 4, 16) | (_fields(blocks[..., 2:6], 1, 1) << np.uint8(4))
    return _Parts(codes, _half(blocks, 0), 16)


def _q5_1(blocks: Bytes) -> _Parts:
    codes = _fields(blocks[..., 8:], 4, 16) | (_fields(blocks[..., 4:8], 1, 1) << np.uint8(4))
    return _Parts(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Parts:
    return _Parts(blocks[..., 2:] ^ np.uint8(0x80), _half(blocks, 0), 128)  # two's complement c to c + 128


def _q2_k(blocks: Bytes) -> _Parts:
    scales = _half(blocks, 80) * (blocks[..., :16] & 15)
    offsets = -(_half(blocks, 82) * (blocks[..., :16] >> 4))
    return _Parts(_fields(blocks[..., 16:80], 2, 32), scales, offsets)


def _q3_k(blocks: Bytes) -> _Parts:
    codes = _fields(blocks[..., 32:96], 2, 32) | (_fields(blocks[..., :32], 1, 32) << np.uint8(2))
    sc = _fields(blocks[..., 96:104], 4, 8) | (_fields(blocks[..., 104:108], 2, 4) << np.uint8(4))
    return _Parts(codes, _half(blocks, 108) * (sc.astype(np.float32) - 32), 4)


def _q4_k(blocks: Bytes) -> _Parts:
    return _Parts(_fields(blocks[..., 16:], 4, 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: Bytes) -> _Parts:
    codes = _fields(blocks[..., 48:], 4, 32) | (_fields(blocks[..., 16:48], 1, 32) << np.uint8(4))
    return _Parts(codes, *_scales_and_offsets(blocks))


def _q6_k(blocks: Bytes) -> _Parts:
    codes = _fields(blocks[..., :128], 4, 64) | (_fields(blocks[..., 128:192], 2, 32) << np.uint8(4))
    return _Parts(codes, _half(blocks, 208) * blocks[..., 192:208].view(np.int8), 32)


BLOCK_TYPES = {
    "Q4_0": BlockType(4, 32, 18, True, _q4_0),
    "Q4_1": BlockType(4, 32, 20, False, _q4_1),
    "Q5_0": BlockType(5, 32, 22, True, _q5_0),
    "Q5_1": BlockType(5, 32, 24, False, _q5_1),
    "Q8_0": BlockType(8, 32, 34, True, _q8_0),
    "Q2_K": BlockType(2, 16, 84, False, _q2_k),
    "Q3_K": BlockType(3, 16, 110, True, _q3_k),
    "Q4_K": BlockType(4, 32, 144, False, _q4_k),
    "Q5_K": BlockType(5, 32, 176, False, _q5_k),
    "Q6_K": BlockType(6, 16, 210, True, _q6_k),
}


def _fields(data: Bytes, width: int, run: int) -> Bytes:
    """Fields of `width` bits of data [N, B, n] as [N, B, n * 8 / width], in the order the module's text gives."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = data.reshape(*data.shape[:2], -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << width) - 1)).reshape(*data.shape[:2], -1)


def _half(blocks: Bytes, start: int) -> Floats:
    """The fp16 at byte `start` of blocks [N, B, bytes], as [N, B, 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2").astype(np.float32)


def _scales_and_offsets(blocks: Bytes) -> tuple[Floats, Floats]:
    """[N, B, 8] each, of Q4_K and Q5_K: six bits of sc and mn of groups 0-3 lie in bytes 0-3 and 4-7; of groups 4-7 the
    low nibbles and high nibbles of bytes 8-11, and above them the two upper bits of bytes 0-3 and 4-7."""
    sc, mn, nibbles = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([sc & 63, (nibbles & 15) | (sc >> 6) << 4], -1)
    mins = np.concatenate([mn & 63, (nibbles >> 4) | (mn >> 6) << 4], -1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * mins)


def _transposed(values: npt.NDArray[np.uint8 | np.float32]) -> Tensor:
    """[N, B, n] as [B * n, N]."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(values.shape[0], -1).T))
