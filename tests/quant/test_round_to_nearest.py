"""Weights rounded to nearest: our GPTQ reader gives them back within half a step; files stay within their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.packing import unpack_words
from appliance.quant.round_to_nearest import round_to_gptq
from appliance.quant.shards import ShardWriter
from appliance.quant.weight import QuantizedWeight
from tests.quant.writers import gptq_config

MODULE = "model.layers.0.mlp.up_proj"
K, N = 128, 64


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_a_rounded_weight_reads_as_within_half_a_step(tmp_path: Path, group_size: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(N, K)
    writer = ShardWriter(tmp_path)
    for name, tensor in round_to_gptq(weight, 4, group_size).items():
        writer.add(f"{MODULE}.{name}", tensor)
    writer.close()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": gptq_config(group_size)}))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.report.format, checkpoint.report.symmetric) == ("gptq", True)
    read = checkpoint.linear(MODULE)
    assert isinstance(read, QuantizedWeight)
    step = read.scales.repeat_interleave(read.group_size, 0).t()
    # Half a step of rounding, and the scales' own float16 where a code meets its limit.
    assert ((read.dequantize() - weight).abs() <= 0.51 * step).all()
    assert (int(read.codes.amin()), int(read.codes.amax())) == (0, 15), "the codes should use their whole range"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_width_is_stored_as_version_1_has_it(bits: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(N, K)
    tensors = round_to_gptq(weight, bits, 32)
    codes, zeros = unpack_words(tensors["qweight"], bits, 0), unpack_words(tensors["qzeros"], bits, 1)
    assert (zeros == (1 << (bits - 1)) - 1).all(), "zero points are stored minus one"
    scales = tensors["scales"].float()[tensors["g_idx"].long()]
    error = (scales * (codes.float() - (1 << (bits - 1)))).t() - weight
    limit = 0.5 + (1 << (bits - 1)) * 2**-11  # of a step: rounding, and the float16 scale of the largest code
    assert (error.abs() <= 1.001 * limit * scales.t()).all()


def test_a_group_of_zeros_stays_zero() -> None:
    tensors = round_to_gptq(torch.zeros(N, K), 4, 32)
    assert (unpack_words(tensors["qweight"], 4, 0) == 8).all()
    assert (tensors["scales"] > 0).all()


def test_files_hold_no_more_than_they_may(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(5)}  # 400 bytes each
    writer = ShardWriter(tmp_path, shard_bytes=1000)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert len(list(tmp_path.iterdir())) == 4
