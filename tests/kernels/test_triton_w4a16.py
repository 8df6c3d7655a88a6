"""The Triton W4A16 kernel, interpreted: equal to the reference for every group, shape and data type it takes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from appliance.kernels.reference.linear import linear
from appliance.kernels.reference.w4a16 import unpack_w4
from appliance.kernels.reference.w4a16 import w4a16 as reference
from appliance.kernels.registry import KERNELS, plan_linear
from appliance.kernels.spec import LinearSpec, Target
from appliance.kernels.triton_w4a16 import base_of, ptx_of, tile_for, w4a16
from appliance.kernels.w4a16_pack import ONE_GROUP, pack_w4, run_group_size
from appliance.quant.weight import QuantizedWeight
from tests.kernels.test_linear import random_weight

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Of the largest output: products and sums are fp32, so little is lost beside the output's own rounding. fp16: half a
# unit of 11 bits. bf16: a whole unit of 8, as the interpreter truncates.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def symmetric(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, offsets=-8.0 * weight.scales)


WEIGHTS = {
    "g32": random_weight(256, 64, 32),
    "g64": random_weight(256, 200, 64),
    "g128": random_weight(384, 131, 128),
    "g256-runs-as-128": random_weight(512, 48, 256),
    "one-group": random_weight(384, 37, 384),
    "K-not-of-32-g32": random_weight(167, 61, 32),
    "K-below-a-block": random_weight(72, 17, 64),
    "last-group-short": random_weight(160, 80, 128),
    "one-group-of-a-prime": random_weight(131, 13, 131),
    "3-bit": random_weight(128, 64, 32, bits=3),
}
WEIGHTS |= {f"{name}-symmetric": symmetric(weight) for name, weight in WEIGHTS.items()}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[found.dtype], f"error {error:.2e} of the largest output"


@pytest.mark.parametrize("name", WEIGHTS)
def test_packing_keeps_every_weight(name: str) -> None:
    weight = WEIGHTS[name]
    packed = pack_w4(weight)
    assert torch.equal(unpack_w4(packed).t(), weight.dequantize())
    assert (packed.offsets is None) == name.endswith("symmetric")


@DTYPES
@pytest.mark.parametrize("name", WEIGHTS)
def test_kernel_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """Rows lie in a wider tensor of NaN: nothing beyond K or M may be read into a sum."""
    weight = WEIGHTS[name]
    packed = pack_w4(weight)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(weight.N, generator=generator).to(dtype)
    for rows in (1, 17):
        x = torch.empty(rows + 1, weight.K + 3, dtype=dtype)[:rows, : weight.K]
        x.copy_(torch.randn(rows, weight.K, generator=generator))
        found = w4a16(x, packed, bias)
        assert (found.dtype, found.shape) == (dtype, (rows, weight.N))
        assert_close(found, linear(x, weight) + bias.float())


@DTYPES
@pytest.mark.parametrize("group_size", [32, 128, 256])
def test_every_tile_equals_the_reference(group_size: int, dtype: torch.dtype) -> None:
    """Both sides of each change of tile, and more rows than one tile."""
    packed = pack_w4(random_weight(256, 64, group_size))
    for rows in (16, 33, 67):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert_close(w4a16(x, packed), reference(x, packed))
    assert len({tile_for(rows, 4, True) for rows in (16, 32, 67)}) == 3


def test_no_rows_make_no_output() -> None:
    assert w4a16(torch.empty(0, 256, dtype=torch.float16), pack_w4(WEIGHTS["g32"])).shape == (0, 64)


def test_large_cancelling_activations_keep_their_accuracy() -> None:
    """A common part of all activations makes the base's contribution huge; it cancels without a trace."""
    weight = random_weight(1024, 32, 128)
    x = (torch.randn(3, 1024, generator=torch.Generator().manual_seed(2)) + 100.0).half()
    assert_close(w4a16(x, pack_w4(weight)), linear(x, weight))


def test_act_order_layer_permutes_its_activation() -> None:
    """Sizes go up and down: no scratch of an earlier call is met again."""
    entry = plan_linear(LinearSpec(160, 48, 4, 32, True), Target("cuda", torch.float16, False)).decode
    assert entry.name == "triton_w4a16"
    for K in (160, 320, 96):
        weight = random_weight(K, 48, 32, act_order=True)
        kernel = entry.pack(weight, torch.float16)
        for rows in (19, 2):
            x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).half()
            assert_close(kernel(x), linear(x, weight))
        assert kernel.nbytes >= weight.codes.numel() // 2


@pytest.mark.parametrize(("K", "group_size", "runs"), [(96, 96, ONE_GROUP), (64, 128, ONE_GROUP), (256, 32, 32)])
def test_run_group(K: int, group_size: int, runs: int) -> None:
    assert run_group_size(LinearSpec(K, 32, 4, group_size)) == runs


@pytest.mark.parametrize(
    ("spec", "target", "found"),
    [
        (LinearSpec(128, 64, 8, 32), Target("cuda", torch.float16, False), "found 8"),
        (LinearSpec(128, 64, 4, 16), Target("cuda", torch.float16, False), "16"),
        (LinearSpec(128, 64, 4, 32), Target("cuda", torch.float32, False), "float32"),
        (LinearSpec(128, 64, 4, 32), Target("cpu", torch.bfloat16, False), "found cpu"),
        (LinearSpec(128, 64, 16), Target("cuda", torch.float16, False), "dense"),
    ],
)
def test_refusal_says_what_was_found(spec: LinearSpec, target: Target, found: str) -> None:
    [entry] = [entry for entry in KERNELS if entry.name == "triton_w4a16"]
    reason = entry.refuse(spec, target)
    assert reason is not None
    assert found in reason


def emulate(ptx: str, register: np.ndarray) -> np.ndarray:
    """Run the two PTX instructions that the kernel uses on 32-bit registers."""
    values = {"$1": register}
    for line in re.findall(r"(?:shr\.u32|lop3\.b32)[^;]*", ptx):
        name, *operands = re.split(r"[ ,]+", line)
        target, source = operands[0], values[operands[1]]
        if name == "shr.u32":
            values[target] = source >> np.uint32(int(operands[2]))
        else:
            mask, bits, table = (np.uint32(int(operand, 16)) for operand in operands[2:])
            assert table == (0xF0 & 0xCC | 0xAA), "the truth table of (a & b) | c"
            values[target] = source & mask | bits
    return values["$0"]


@DTYPES
@pytest.mark.parametrize("j", range(4))
def test_bit_trick_is_exact_for_every_word(j: int, dtype: torch.dtype) -> None:
    """All 65,536 words in either lane beside a lane of other bits: exactly base + nibble j."""
    words = np.arange(1 << 16, dtype=np.uint32)
    others = np.random.default_rng(0).permutation(words)
    found = emulate(ptx_of(dtype == torch.bfloat16, j), words | others << np.uint32(16))
    base = base_of(dtype == torch.bfloat16, j)
    for lane, nibbles in ((found & 0xFFFF, words), (found >> 16, others)):
        values = torch.from_numpy(lane.astype(np.uint16).view(np.int16)).view(dtype).double()
        expected = base + (nibbles >> np.uint32(4 * j) & 15).astype(np.float64)
        assert torch.equal(values, torch.from_numpy(expected))
