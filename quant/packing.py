"""Packing codes into words and back, in plain torch. It knows bit positions, not formats or checkpoints.

The words of a line are one string of bits, least significant first: code i is at bits [bits*i, bits*i + bits). Where
`bits` divides the word that is code j of a word at bits [bits*j, bits*j + bits); 3-bit codes straddle words. `order`
renumbers the codes inside a word (AutoAWQ's gemm files).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """All whole codes of `words` [R, C] of any signed integer dtype, as uint8, unpacked along `dim` (0 or 1).

    bits is 1 to 8. Code j of a word is taken from field order[j]; an order needs bits that divide the word.
    """
    width = 8 * words.element_size()
    words_per_cycle, per_cycle = bits // math.gcd(bits, width), width // math.gcd(bits, width)
    fields = list(order) if order is not None else list(range(per_cycle))
    mask = (1 << bits) - 1
    shape = list(words.shape)
    shape[dim] = shape[dim] * width // bits
    codes = torch.empty(shape, dtype=torch.uint8)
    for j, field in enumerate(fields):
        target = codes[j::per_cycle] if dim == 0 else codes[:, j::per_cycle]
        word, shift = divmod(bits * field, width)
        values = _every(words, dim, word, words_per_cycle, target.shape[dim]) >> shift
        if shift + bits > width:
            low = width - shift
            following = _every(words, dim, word + 1, words_per_cycle, target.shape[dim])
            values = (values & ((1 << low) - 1)) | (following << low)
        # >> is arithmetic: the mask after the shift removes the copies of the sign.
        target.copy_(values & mask)
    return codes


def _every(words: Tensor, dim: int, start: int, step: int, count: int) -> Tensor:
    """`count` lines of `words`, every `step`-th from `start` on."""
    return words[start::step][:count] if dim == 0 else words[:, start::step][:, :count]


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
