"""Packing and unpacking are each other's inverse, and the words are those the formats document."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from appliance.quant.formats.awq_gemm import NIBBLE_OF_COLUMN
from appliance.quant.packing import pack_nibble_rows, pack_words, unpack_nibble_rows, unpack_words
from tests.quant.writers import pack


@given(
    bits=st.sampled_from([2, 4, 8]),
    words=st.integers(1, 4),
    others=st.integers(1, 9),
    dim=st.sampled_from([0, 1]),
    seed=st.integers(0, 999),
)
def test_words_round_trip(bits: int, words: int, others: int, dim: int, seed: int) -> None:
    length = words * 32 // bits
    shape = (length, others) if dim == 0 else (others, length)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_words(codes, bits, dim)
    assert packed.dtype == torch.int32
    assert torch.equal(unpack_words(packed, bits, dim), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_whole_code_of_a_string_of_bits_is_unpacked(bits: int, width: int, dim: int) -> None:
    shape = (5, 61) if dim else (61, 5)
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(bits))
    words = pack(codes, dim, bits, width)
    unpacked = unpack_words(words, bits, dim)
    assert unpacked.shape[dim] == words.shape[dim] * width // bits
    assert torch.equal(unpacked.narrow(dim, 0, 61).long(), codes)
    assert not bool(unpacked.narrow(dim, 61, unpacked.shape[dim] - 61).any())


def test_words_are_least_significant_first() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=torch.uint8)
    assert pack_words(codes, 4, 1).item() == 0xF7654321 - (1 << 32)


def test_awq_words_hold_the_even_columns_in_the_low_half() -> None:
    # AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 from the least significant nibble on.
    codes = torch.arange(8, dtype=torch.uint8).view(1, 8)
    packed = pack_words(codes, 4, 1, NIBBLE_OF_COLUMN)
    assert packed.item() == 0x75316420
    assert torch.equal(unpack_words(packed, 4, 1, NIBBLE_OF_COLUMN), codes)


@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_nibble_rows_round_trip(rows: int) -> None:
    codes = torch.randint(0, 16, (rows, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    kept = codes.clone()
    assert torch.equal(unpack_nibble_rows(pack_nibble_rows(codes), rows), codes)
    assert torch.equal(codes, kept)


def test_codes_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(ValueError, match="9 codes do not fill words of 8"):
        pack_words(torch.zeros(9, 1, dtype=torch.uint8), 4, 0)
