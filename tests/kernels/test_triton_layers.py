"""The Triton kernels between matrix multiplies, interpreted, against their references over odd sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.reference import layers as reference
from appliance.kernels.triton_gated import gelu_and_mul, silu_and_mul
from appliance.kernels.triton_rms_norm import rms_norm
from appliance.kernels.triton_rope import rope
from appliance.models.rope import RotaryTable
from appliance.models.rope_config import RopeConfig

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# fp32: sums in another order. fp16: half a unit of 11 bits. bf16: a whole unit of 8, as the interpreter truncates.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp16", "bf16"])


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found.float(), expected.float(), atol=TOLERANCE[found.dtype], rtol=TOLERANCE[found.dtype]
    )


@DTYPES
@pytest.mark.parametrize("size", [1, 61, 576, 1031])
def test_norm_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    """With and without a residual, which takes up x as an unfused sum would, and is what is normed."""
    x = random(3, size + 5, dtype=dtype)[:, :size]
    weight = random(size, dtype=dtype)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = random(3, size, dtype=dtype)
    unfused = residual + x
    found = rms_norm(x, weight, 1e-5, residual)
    assert_close(residual, unfused)
    assert_close(found, F.rms_norm(residual.float(), (size,), weight.float(), 1e-5))


def test_norm_of_large_values_does_not_overflow() -> None:
    """Squares of float16 values beyond 256 do not fit float16."""
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones(1, 64, dtype=torch.float16))


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(12, 64, 64), (1, 24, 24), (5, 26, 10)])
def test_rope_equals_the_reference(heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    """In place on some heads of a wider row; the others stay."""
    table = RotaryTable(RopeConfig(theta=10000.0), rotary_dim, 64, dtype)
    cos, sin = table.at(torch.tensor([0, 3, 63]))
    qkv = random(3, heads + 2, head_dim, dtype=dtype)
    before, expected = qkv.clone(), qkv.clone().float()
    rope(qkv[:, :heads], cos, sin)
    reference.rope(expected[:, :heads], cos, sin)
    assert_close(qkv, expected)
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    assert torch.equal(qkv[..., rotary_dim:], before[..., rotary_dim:])


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (3, 24)])
def test_rope_norms_each_head_first(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Qwen 3: with a weight of its own for each head; heads beyond those stay."""
    cos, sin = RotaryTable(RopeConfig(theta=10000.0), head_dim, 64, dtype).at(torch.tensor([0, 3, 63]))
    norm = random(heads, head_dim, dtype=dtype)
    qkv = 3 * random(3, heads + 2, head_dim, dtype=dtype)
    before, expected = qkv.clone(), qkv.clone().float()
    rope(qkv[:, :heads], cos, sin, norm, 1e-5)
    reference.rope(expected[:, :heads], cos, sin, norm, 1e-5)
    assert_close(qkv, expected)
    assert torch.equal(qkv[:, heads:], before[:, heads:])


@DTYPES
@pytest.mark.parametrize("size", [1, 96, 1024, 1537])
def test_activation_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    x = random(3, 2 * size + 3, dtype=dtype)[:, : 2 * size] * 4
    assert_close(silu_and_mul(x), reference.silu_and_mul(x))
    assert_close(gelu_and_mul(x), reference.gelu_and_mul(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_norms_take_weights_in_float32(dtype: torch.dtype) -> None:
    """One plus what the checkpoint holds has more digits than 16 bits."""
    x, weight = random(3, 61, dtype=dtype), 1 + random(61, dtype=dtype).float() / 100
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    cos, sin = RotaryTable(RopeConfig(theta=10000.0), 24, 64, dtype).at(torch.tensor([0, 3]))
    norm, heads = 1 + random(5, 24, dtype=dtype).float() / 100, random(2, 5, 24, dtype=dtype)
    expected = heads.float()
    reference.rope(expected, cos, sin, norm, 1e-5)
    rope(heads, cos, sin, norm, 1e-5)
    assert_close(heads, expected)


def test_no_rows_are_no_work() -> None:
    empty = torch.empty(0, 32)
    assert rms_norm(empty, torch.ones(32), 1e-5).shape == (0, 32)
    assert silu_and_mul(empty).shape == (0, 16)
    rope(empty.view(0, 2, 16), torch.empty(0, 1, 16), torch.empty(0, 1, 16))
