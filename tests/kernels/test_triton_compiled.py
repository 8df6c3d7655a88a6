"""Every Triton kernel compiled for every card it should run on: shared memory, spills, instructions in the loop.

Compiling needs no GPU, and shows that a kernel builds, fits and how long its loop is; not how fast it runs.
"""

from __future__ import annotations

import pytest

from appliance.kernels.triton_paged_attention import DECODE_TOKENS, PREFILL_TOKENS
from appliance.kernels.triton_w4a16 import tile_for
from tests.kernels.compiled import ARCHITECTURES, SHARED_LIMIT, Facts, Variant, compile_offline

ALL = ARCHITECTURES
TIGHTEST = (86,)
"""Least shared memory: for kernels whose code is alike on all cards."""
W4A16_POINTERS = {
    "words_ptr": "i16",
    **dict.fromkeys(("scales_ptr", "offsets_ptr", "correction_ptr", "sums_ptr"), "fp32"),
}
INTEGER = frozenset(
    "LOP3 SHF IMAD IADD3 PRMT I2F I2FP I2I F2F SGXT LEA ISETP SEL IMNMX R2P LOP IADD VIADD".split()  # noqa: SIM905
)
"""Instructions that take the integer and logic pipe, of which dequantising must leave enough."""


def w4a16(
    M: int, slices: int, symmetric: bool, dtype: str = "fp16", even: bool = True, one_scale: bool = False
) -> Variant:
    """The tile that `tile_for` gives M rows; `even` is a K divisible by 128, without a bias."""
    block_m, block_n, warps, stages = tile_for(M, slices, even)
    constants = {
        "SLICES": slices,
        "ONE_SCALE": int(one_scale),
        "HAS_OFFSETS": int(not symmetric),
        "HAS_BIAS": int(not even),
        "EVEN_K": int(even),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STAGES": stages,
    }
    pointers = {**W4A16_POINTERS, **dict.fromkeys(("x_ptr", "y_ptr", "bias_ptr"), dtype)}
    ragged = ("M", "N") if even else ("M", "N", "K", "stride_x")
    return Variant("triton_w4a16", "w4a16_kernel", constants, pointers, ragged, (), warps, stages)


def attention(kernel: str, dtype: str, heads: tuple[int, int, int], **constants: int) -> Variant:
    """A kernel of the paged cache with blocks of 16 tokens, as its wrapper would launch it."""
    num_heads, num_kv_heads, head_dim = heads
    constants = {
        "HAS_CAP": 0,
        **constants,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "DIMS": head_dim,
        "STAGES": 2,
    }
    pointers = {
        **dict.fromkeys(("out_ptr", "q_ptr", "keys_ptr", "values_ptr"), dtype),
        **dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"), "i32"),
        **dict.fromkeys(("parts_ptr", "part_maxima_ptr", "part_weights_ptr"), "fp32"),
    }
    return Variant("triton_paged_attention", kernel, constants, pointers, ("window",), ("scale", "soft_cap"), 4, 2)


DECODE = {"NUM_SPLITS": 8, "BLOCK_M": 16, "TOKENS": DECODE_TOKENS}
PREFILL = {"QUERIES": 8, "BLOCK_M": 64, "TOKENS": PREFILL_TOKENS}
VARIANTS: dict[str, tuple[Variant, tuple[int, ...]]] = {
    "w4a16-decode-symmetric": (w4a16(1, 4, symmetric=True), ALL),
    "w4a16-decode-bf16": (w4a16(1, 4, symmetric=False, dtype="bf16"), (86, 90)),
    "w4a16-decode-g32-tail": (w4a16(1, 1, symmetric=False, even=False), TIGHTEST),
    "w4a16-prefill-g128": (w4a16(64, 4, symmetric=False), ALL),
    "w4a16-sums": (
        Variant(
            "triton_w4a16",
            "group_sums_kernel",
            {"SLICES": 4, "ZERO": 8, "HAS_OFFSETS": 1, "BLOCK": 64},
            {"correction_ptr": "fp32", "sums_ptr": "fp32"},
            ragged=("M", "K", "groups", "stride_x"),
        ),
        TIGHTEST,
    ),
    "decode-fp16": (attention("paged_decode_kernel", "fp16", (40, 8, 128), **DECODE), ALL),
    "decode-bf16-wide": (attention("paged_decode_kernel", "bf16", (8, 4, 256), **DECODE), TIGHTEST),
    "decode-bf16-capped": (attention("paged_decode_kernel", "bf16", (8, 4, 256), **DECODE, HAS_CAP=1), TIGHTEST),
    "prefill-bf16-capped": (attention("paged_prefill_kernel", "bf16", (8, 4, 256), **PREFILL, HAS_CAP=1), TIGHTEST),
    "prefill-fp16": (attention("paged_prefill_kernel", "fp16", (40, 8, 128), **PREFILL), ALL),
    "prefill-bf16-wide": (attention("paged_prefill_kernel", "bf16", (8, 4, 256), **PREFILL), TIGHTEST),
    "combine": (
        Variant(
            "triton_paged_attention",
            "combine_kernel",
            {"HEAD_DIM": 128, "NUM_SPLITS": 8, "SPLITS": 8, "DIMS": 128},
            dict.fromkeys(("parts_ptr", "part_maxima_ptr", "part_weights_ptr"), "fp32"),
        ),
        TIGHTEST,
    ),
    "kv-write": (
        Variant(
            "triton_kv_write",
            "kv_write_kernel",
            {"NUM_KV_HEADS": 40, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "ROWS": 128, "DIMS": 128},
            {"slot_mapping_ptr": "i64"},
            ragged=("num_blocks",),
        ),
        TIGHTEST,
    ),
    "rms-norm": (
        Variant(
            "triton_rms_norm",
            "rms_norm_kernel",
            {"SIZE": 5120, "BLOCK": 8192, "HAS_RESIDUAL": 1},
            dict.fromkeys(("x_ptr", "y_ptr", "weight_ptr", "residual_ptr"), "bf16"),
            floats=("eps",),
            warps=16,
        ),
        TIGHTEST,
    ),
    "rope": (
        Variant(
            "triton_rope",
            "rope_kernel",
            {"HAS_NORM": 1, "HEADS": 48, "HEAD_DIM": 128, "HALF": 64, "ROWS": 64, "DIMS": 64},
            floats=("eps",),
        ),
        TIGHTEST,
    ),
    "gelu-and-mul": (Variant("triton_gated", "gated_kernel", {"IS_GELU": 1, "BLOCK": 1024}), TIGHTEST),
}


def assert_fits(facts: Facts) -> None:
    """The block's shared memory is there, and no loop moves registers to memory and back.

    A few bytes of stack before the loop are the compiler's trade for another resident block.
    """
    assert facts.shared <= SHARED_LIMIT[facts.architecture]
    assert facts.local == 0
    assert facts.stack <= 16
    assert not {"LDL", "STL"} & facts.loop.keys()


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Facts]]:
    """Facts by variant, one process for all of each set of architectures."""
    found: dict[str, list[Facts]] = {}
    for architectures in {architectures for _, architectures in VARIANTS.values()}:
        names = [name for name, (_, wanted) in VARIANTS.items() if wanted == architectures]
        rows = compile_offline([VARIANTS[name][0] for name in names], architectures)
        found |= dict(zip(names, rows, strict=True))
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_fits_every_card(name: str, compiled: dict[str, list[Facts]]) -> None:
    _, architectures = VARIANTS[name]
    assert tuple(facts.architecture for facts in compiled[name]) == architectures
    for facts in compiled[name]:
        assert_fits(facts)
        assert facts.shared <= 99 << 10, "one tile serves all cards"


def per_weight(variant: Variant, facts: Facts, names: frozenset[str] | None = None) -> float:
    """Instructions of the loop, those of `names` or all, for each weight that a thread handles in it."""
    weights = 128 * variant.constants["BLOCK_N"] / (32 * variant.warps)
    return sum(n for name, n in facts.loop.items() if names is None or name in names) / weights


@pytest.mark.parametrize(
    ("name", "integer", "total"),
    [
        ("w4a16-decode-symmetric", 1.1, 1.85),  # reached: 1.00 and 1.78 on sm_86, 0.93 and 1.73 on sm_90
        ("w4a16-decode-bf16", 1.35, 2.4),  # three shifts more in eight weights, and offsets: 1.26 and 2.25
        ("w4a16-prefill-g128", 1.7, 4.5),  # more products than weights: no target
    ],
)
def test_loop_stays_within_its_instructions(
    name: str, integer: float, total: float, compiled: dict[str, list[Facts]]
) -> None:
    """At full bandwidth an H100 has 2.3 integer instructions a weight, an RTX 3090 4.75: dequantising needs half.

    Weights stay in registers: on cards without warp-group products the loop stores nothing to shared memory.
    """
    variant, _ = VARIANTS[name]
    for facts in compiled[name]:
        assert 0 < per_weight(variant, facts, INTEGER) <= integer
        assert per_weight(variant, facts) <= total
        if name.startswith("w4a16-decode"):
            assert "STS" not in facts.loop


@pytest.mark.slow
def test_every_variant_of_w4a16_fits_every_card() -> None:
    """All tiles, groups, zero points and tails."""
    variants = [
        w4a16(M, slices, symmetric, dtype, even, one_scale)
        for M in (1, 32, 64)
        for slices in (1, 2, 4)
        for symmetric, dtype in ((True, "fp16"), (False, "bf16"))
        for even in (True, False)
        for one_scale in {False, slices == 4}
        if M <= 32 or (slices == 4 and even)  # more rows run as 32 otherwise
    ]
    for row in compile_offline(variants):
        for facts in row:
            assert_fits(facts)
