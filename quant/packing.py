"""Packing codes into words and back, in plain torch. It knows bit positions, not formats or checkpoints.

A word of `32 // bits` codes holds code j at bits [bits*j, bits*j + bits), least significant first; `order` renumbers
the codes inside a word (AutoAWQ's gemm files).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Codes of int32 `words` [R, C], unpacked along `dim` (0 or 1), as uint8 [R * 32/bits, C] or [R, C * 32/bits].

    Code j of a word is taken from field order[j], or from field j without an order. Of a width that does not divide 32
    (3, 5, 6, 7), the highest bits of each word are not used.
    """
    per_word = 32 // bits
    fields = list(order) if order is not None else list(range(per_word))
    mask = (1 << bits) - 1
    shape = list(words.shape)
    shape[dim] *= per_word
    codes = torch.empty(shape, dtype=torch.uint8)
    for j, field in enumerate(fields):
        # int32 >> is arithmetic: the mask after the shift removes the copies of the sign.
        values = (words >> (bits * field)) & mask
        if dim == 0:
            codes[j::per_word] = values
        else:
            codes[:, j::per_word] = values
    return codes


def unpack_bit_string(words: Tensor, bits: int, dim: int) -> Tensor:
    """Codes of int32 `words` [R, C] that lie without gaps along `dim` (0 or 1): code j is at bit bits*j of the words,
    least significant first, and may straddle two. bits is 1 to 8.

    uint8, ceil(words / bits) * 32 codes along `dim`; those past the end of the words are 0.
    """
    if dim == 0:
        return unpack_bit_string(words.t(), bits, 1).t()
    rows, columns = words.shape
    blocks = -(-columns // bits)  # 32 codes fill `bits` words
    words = torch.nn.functional.pad(words, (0, blocks * bits - columns)).view(rows, blocks, bits)
    codes = torch.empty(rows, blocks, 32, dtype=torch.uint8)
    for code in range(32):
        word, shift = divmod(code * bits, 32)
        low = min(bits, 32 - shift)  # bits of the code that this word holds
        values = (words[:, :, word] >> shift) & ((1 << low) - 1)
        if low < bits:
            values |= (words[:, :, word + 1] & ((1 << (bits - low)) - 1)) << low
        codes[:, :, code] = values
    return codes.view(rows, blocks * 32)


def pack_words(codes: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """The inverse of `unpack_words`: int32 words of uint8 `codes` along `dim`, whose length must be whole words."""
    per_word = 32 // bits
    if codes.shape[dim] % per_word:
        raise ValueError(f"{codes.shape[dim]} codes do not fill words of {per_word}")
    fields = list(order) if order is not None else list(range(per_word))
    shape = list(codes.shape)
    shape[dim] //= per_word
    words = torch.zeros(shape, dtype=torch.int64)
    for j, field in enumerate(fields):
        values = codes[j::per_word] if dim == 0 else codes[:, j::per_word]
        words |= values.to(torch.int64) << (bits * field)
    return as_int32(words)


def as_int32(words: Tensor) -> Tensor:
    """int64 words modulo 2**32 as int32 of the same bits."""
    words = words & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def pack_nibble_rows(codes: Tensor) -> Tensor:
    """uint8 [ceil(K/2), N]: row r holds code row 2r in its low nibbles and row 2r+1 (0 past the end) in its high."""
    low = codes[0::2].clone()
    high = codes[1::2]
    low[: high.shape[0]] |= high << 4
    return low


def unpack_nibble_rows(packed: Tensor, rows: int) -> Tensor:
    """The inverse of `pack_nibble_rows`: uint8 [rows, N]."""
    codes = torch.empty(packed.shape[0] * 2, packed.shape[1], dtype=torch.uint8)
    codes[0::2] = packed & 15
    codes[1::2] = packed >> 4
    return codes[:rows]
