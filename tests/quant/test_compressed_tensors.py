"""compressed-tensors: files of the real package and of an independent writer, read exactly; contradictions refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from tests.quant.compressed_tensors_writer import compressed_config, compressed_tensors, group
from tests.quant.writers import MODULE, exact_weight, write_folder

FIXTURES = Path(__file__).parent / "fixtures"
# Case -> what describe() says. Written by version 0.20.1 of the package, except "old": by version 0.10.2.
NEW = {
    **{
        f"compressed_tensors_{bits}_bit_asymmetric": f"compressed-tensors {bits}-bit, group 32, asymmetric"
        for bits in range(2, 9)
    },
    "compressed_tensors_4_bit_symmetric": "compressed-tensors 4-bit, group 64, symmetric",
    "compressed_tensors_4_bit_channel": "compressed-tensors 4-bit, one group per column, asymmetric",
    "compressed_tensors_8_bit_channel": "compressed-tensors 8-bit, one group per column, symmetric",
}
OLD = {
    **{
        f"compressed_tensors_{bits}_bit_with_gaps": f"compressed-tensors {bits}-bit, group 32, symmetric"
        for bits in (3, 5, 6, 7)
    },
    "compressed_tensors_act_order": "compressed-tensors 4-bit, group 32, symmetric, act-order",
}


@pytest.mark.parametrize("case", [*NEW, *OLD])
def test_a_file_of_the_package_is_read_as_the_package_reads_it(case: str) -> None:
    expected = load_file(FIXTURES / f"expected_compressed_tensors_{'old' if case in OLD else 'new'}.safetensors")[case]
    checkpoint = open_checkpoint(FIXTURES / case)
    assert checkpoint.report.describe() == (NEW | OLD)[case]
    assert checkpoint.report.warnings == ()
    # Both round the same exact product once: theirs in bfloat16 arithmetic, ours when leaving float32.
    assert torch.equal(checkpoint.tensor(f"{MODULE}.weight").bfloat16(), expected)


def integers(rows: int, columns: int, groups: int, bits: int, *, symmetric: bool = False) -> tuple[Tensor, ...]:
    """Codes [K, N], zero points and fp16 scales [G, N]."""
    generator = torch.Generator().manual_seed(rows + bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    zeros = torch.randint(0, 1 << bits, (groups, columns), generator=generator)
    zeros[0, :2] = torch.tensor([0, (1 << bits) - 1])
    scales = (torch.rand(groups, columns, generator=generator) * 0.1 + 0.001).half()
    return codes, torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros, scales


def read(folder: Path) -> QuantizedWeight:
    weight = open_checkpoint(folder).linear(MODULE)
    assert isinstance(weight, QuantizedWeight)
    return weight


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("rows", "columns", "group_size"), [(96, 24, 32), (104, 20, 64), (160, 8, None)])
def test_every_width_and_packing_is_exact(
    tmp_path: Path, rows: int, columns: int, group_size: int | None, bits: int, symmetric: bool, gaps: bool
) -> None:
    size = group_size or rows
    codes, zeros, scales = integers(rows, columns, -(-rows // size), bits, symmetric=symmetric)
    tensors = compressed_tensors(codes, None if symmetric else zeros, scales, bits, gaps=gaps)
    config = compressed_config(group(bits, group_size, symmetric=symmetric))
    weight = read(write_folder(tmp_path, tensors, config))
    assert torch.equal(weight.dequantize().double(), exact_weight(codes, zeros, scales, torch.arange(rows) // size))
    assert (weight.bits, weight.group_size, weight.K, weight.N) == (bits, size, rows, columns)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("actorder", ["group", "dynamic", True, None, "weight"])
def test_inputs_are_grouped_by_weight_g_idx_whatever_actorder_says(tmp_path: Path, key: str, actorder: Any) -> None:
    codes, zeros, scales = integers(128, 16, 4, 4)
    order = (torch.arange(128) // 32)[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    tensors = compressed_tensors(codes, zeros, scales, 4, order=order)
    folder = write_folder(tmp_path, tensors)
    config = compressed_config(group(4, 32, symmetric=False, actorder=actorder))
    (folder / "config.json").write_text(json.dumps({key: config}))
    assert torch.equal(read(folder).dequantize().double(), exact_weight(codes, zeros, scales, order))
    assert open_checkpoint(folder).report.act_order


@pytest.mark.parametrize("order", [None, torch.full((128,), -1), torch.arange(128) // 32])
def test_without_an_order_inputs_are_grouped_as_they_come(tmp_path: Path, order: Tensor | None) -> None:
    codes, zeros, scales = integers(128, 16, 4, 4)
    tensors = compressed_tensors(codes, zeros, scales, 4, order=order)
    folder = write_folder(tmp_path, tensors, compressed_config(group(4, 32, symmetric=False, actorder="static")))
    weight = read(folder)
    assert weight.perm is None
    assert torch.equal(weight.dequantize().double(), exact_weight(codes, zeros, scales, torch.arange(128) // 32))


def test_zero_points_of_old_files_are_signed_bytes(tmp_path: Path) -> None:
    codes, zeros, scales = integers(128, 16, 4, 4)
    tensors = compressed_tensors(codes, None, scales, 4)
    tensors[f"{MODULE}.weight_zero_point"] = (zeros - 8).t().to(torch.int8)
    folder = write_folder(tmp_path, tensors, compressed_config(group(4, 32, symmetric=False)))
    exact = exact_weight(codes, zeros, scales, torch.arange(128) // 32)
    assert torch.equal(read(folder).dequantize().double(), exact)


def test_a_module_belongs_to_the_group_that_names_it_most_closely(tmp_path: Path) -> None:
    names = {"a.q_proj": (8, 32), "a.k_proj": (4, None), "a.v_proj": (2, 64), "model.embed_tokens": (6, 32)}
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, (bits, group_size) in names.items():
        size = group_size or 128
        codes, zeros, scales = integers(128, 16, 128 // size, bits, symmetric=True)
        tensors |= compressed_tensors(codes, None, scales, bits, module=name)
        exact[name] = exact_weight(codes, zeros, scales, torch.arange(128) // size)
    tensors["a.o_proj.weight"] = torch.ones(4, 4)
    config = compressed_config(
        group(2, 64),
        group(4, None, "re:.*[qk]_proj$"),
        group(8, 32, "a.q_proj") | {"format": "pack-quantized"},
        group(6, 32, "Embedding"),
        ignore=["lm_head", "re:.*o_proj", "a"],
    )
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, config))
    for name in names:
        assert torch.equal(checkpoint.tensor(f"{name}.weight").double(), exact[name]), name
    assert torch.equal(checkpoint.tensor("a.o_proj.weight"), torch.ones(4, 4))


def test_a_quantised_kv_cache_is_ignored_with_a_sentence(tmp_path: Path) -> None:
    codes, _, scales = integers(128, 16, 4, 4)
    config = compressed_config(group(4, 32), kv_cache_scheme={"num_bits": 8, "type": "float"})
    [warning] = open_checkpoint(
        write_folder(tmp_path, compressed_tensors(codes, None, scales, 4), config)
    ).report.warnings
    assert "kv_cache_scheme, which is ignored" in warning


def test_a_model_of_which_only_the_kv_cache_was_quantised_is_plain(tmp_path: Path) -> None:
    config = compressed_config(kv_cache_scheme={"num_bits": 8, "type": "float"}, format="dense")
    folder = write_folder(tmp_path, {f"{MODULE}.weight": torch.ones(4, 4)}, config)
    assert open_checkpoint(folder).report.format == "safetensors"


CODES, ZEROS, SCALES = integers(128, 16, 4, 4)
SOUND = compressed_tensors(CODES, ZEROS, SCALES, 4)
W4 = group(4, 32, symmetric=False)


def without(suffix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in SOUND.items() if not name.endswith(suffix)}


def with_tensor(suffix: str, tensor: Tensor) -> dict[str, Tensor]:
    return SOUND | {f"{MODULE}.{suffix}": tensor}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (SOUND, None, "weight_packed, but nothing says its quantisation"),
        (SOUND, {"quant_method": "gptq", "bits": 4}, "weight_packed, but config.json quantization_config says gptq"),
        (SOUND, compressed_config(), "no target in config.json quantization_config config_groups matches"),
        (SOUND, compressed_config(group(4, 32, "re:lm_head")), "(found: re:lm_head)"),
        (SOUND, compressed_config(W4, ignore=["re:.*up_proj"]), "ignore 're:.*up_proj' that"),
        (SOUND, compressed_config(group(8, 32, symmetric=False)), "says 8 bits for"),
        (SOUND, compressed_config(group(3, 32, symmetric=False)), "makes 12 words of its 128 inputs"),
        (SOUND, compressed_config(group(4, 64, symmetric=False)), "group_size 64 for"),
        (SOUND, compressed_config(group(4, None, symmetric=False)), "strategy channel for"),
        (SOUND, compressed_config(group(4, 32)), "says symmetric true for"),
        (without("zero_point"), compressed_config(W4), "says symmetric false for"),
        (SOUND, compressed_config(group(4, 32, symmetric=False, actorder="group")), "says actorder 'group' for"),
        (without("weight_shape"), compressed_config(W4), "weight_shape is missing"),
        (without("weight_scale"), compressed_config(W4), "weight_scale is missing"),
        (with_tensor("weight_shape", torch.tensor([128, 16])), compressed_config(W4), "weight_shape [128, 16], do not"),
        (with_tensor("weight_shape", torch.tensor([16])), compressed_config(W4), "do not belong together"),
        (with_tensor("weight_shape", torch.tensor([16, 127])), compressed_config(W4), "bits set after its 127 codes"),
        (with_tensor("weight_scale", torch.ones(16, 4, dtype=torch.int32)), compressed_config(W4), "int32, int64"),
        (with_tensor("weight_scale", torch.full((16, 4), torch.nan)), compressed_config(W4), "holds NaN or infinite"),
        (with_tensor("weight_packed", torch.ones(2, 16, 16)), compressed_config(W4), "do not belong together"),
        (
            with_tensor("weight_zero_point", torch.zeros(16, 4, dtype=torch.int32)),
            compressed_config(W4),
            "is torch.int32 [16, 4], int32 [2, 4] was expected",
        ),
        (
            with_tensor("weight_zero_point", torch.full((16, 4), 8, dtype=torch.int8)),
            compressed_config(W4),
            "holds 8, zero points of 4 bits",
        ),
        (with_tensor("weight_g_idx", torch.zeros(64)), compressed_config(W4), "int32 [128] was expected"),
        (
            with_tensor("weight_g_idx", torch.zeros(128, dtype=torch.int32)),
            compressed_config(W4),
            "names groups 0 to 0 in uneven numbers",
        ),
        (SOUND, compressed_config(group(9, 32)), "num_bits is 9, an integer from 2 to 8"),
        (SOUND, compressed_config(group(4, 0)), "group_size is 0, a positive integer"),
        (SOUND, compressed_config(group(4, 32, strategy="channel")), "strategy 'channel' and group_size 32"),
        (SOUND, compressed_config(group(4, 32, symmetric=1)), "symmetric is 1, true or false"),
        (SOUND, compressed_config(group(4, 32, actorder="sideways")), "actorder is 'sideways', allowed are"),
        (SOUND, compressed_config(W4, ignore="lm_head"), "ignore is 'lm_head', a list of strings"),
        (SOUND, compressed_config(W4 | {"targets": [1]}), "targets is [1], a list of strings"),
        (SOUND, compressed_config(W4 | {"weights": 4}), "weights is 4, an object"),
        (SOUND, compressed_config(W4, config_groups=[]), "config_groups matches"),
        (SOUND, compressed_config(W4, config_groups=[W4]), "an object was expected"),
        (SOUND, compressed_config(W4, config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16 is ['Linear']"),
        (SOUND, compressed_config(group(4, 32, "re:(")), "'(' is not a regular expression"),
        (SOUND, compressed_config(group(4, 32, r"re:(.|.|.|.)*\d\d")), "takes more than 0.5 seconds to match"),
        ({f"{MODULE}.weight": torch.ones(4, 4)}, compressed_config(W4), "no tensor ends in"),
    ],
)
def test_contradictions_are_errors_that_name_both_sides(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None, said: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(write_folder(tmp_path, tensors, config)).linear(MODULE)
    assert said in raised.value.message
    assert not isinstance(raised.value, UnsupportedModelError)


def test_a_width_whose_packing_cannot_be_told_is_refused(tmp_path: Path) -> None:
    codes, zeros, scales = integers(33, 16, 1, 3)
    tensors = compressed_tensors(codes, zeros, scales, 3)
    with pytest.raises(CheckpointError, match="with and without gaps"):
        open_checkpoint(write_folder(tmp_path, tensors, compressed_config(group(3, None, symmetric=False))))


ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (compressed_config(W4 | {"input_activations": ACTIVATIONS}), "quantises activations (input_activations)"),
        (compressed_config(W4 | {"output_activations": ACTIVATIONS}), "quantises activations (output_activations)"),
        (compressed_config(group(4, 32, type="float")), "type is 'float', 'int' is supported"),
        (compressed_config(group(4, 32, strategy="block")), "strategy is 'block'"),
        (compressed_config(group(4, None, strategy=None)), "strategy is 'tensor'"),
        (compressed_config(W4 | {"format": "marlin-24"}), "format 'marlin-24'"),
        (compressed_config(W4, format="int-quantized"), "format 'int-quantized'"),
        (compressed_config(W4, transform_config={"config_groups": {}}), "rotates activations"),
    ],
)
def test_schemes_not_served_are_named_with_those_that_are(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        open_checkpoint(write_folder(tmp_path, SOUND, config))
    assert said in raised.value.message
    assert "weight-only pack-quantized" in raised.value.message
