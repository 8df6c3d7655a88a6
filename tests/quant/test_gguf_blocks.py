"""Every GGUF block type, from random bytes: bit for bit what the gguf package's own dequantiser gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from appliance.errors import CheckpointError
from appliance.quant.formats.gguf_blocks import BLOCK_TYPES, read_blocks

ROWS = 24


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_equal_the_packages_dequantiser(name: str) -> None:
    """Any bits: negative and denormal scales, every code, every sub-scale."""
    kind, (codes, size) = BLOCK_TYPES[name], gguf.GGML_QUANT_SIZES[Kind[name]]
    blocks = np.random.default_rng(0).integers(0, 256, (1000, size), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        values = np.array(gguf.quants.dequantize(blocks, Kind[name]))
    finite = np.isfinite(values).all(1)
    rows = blocks[finite][: ROWS * 20].reshape(ROWS, -1)
    expected = torch.from_numpy(values[finite][: ROWS * 20].reshape(ROWS, -1))
    weight = read_blocks(kind, rows, "w")
    assert weight.codes.shape == (20 * codes, ROWS)
    assert torch.equal(weight.dequantize(), expected)
    assert int(weight.codes.max()) == (1 << kind.bits) - 1
    assert (weight.bits, weight.group_size) == (kind.bits, kind.group_size)
    assert (weight.zeros is not None) == kind.is_symmetric


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_scale_that_is_not_finite_is_refused_by_name(name: str) -> None:
    rows = np.zeros((2, gguf.GGML_QUANT_SIZES[Kind[name]][1]), dtype=np.uint8)
    rows[:, 1::2] = 0x7C  # every fp16 lies at an even byte: 0x7C00 is infinity
    with pytest.raises(CheckpointError, match="tensor w holds NaN or infinite scales"):
        read_blocks(BLOCK_TYPES[name], rows, "w")
