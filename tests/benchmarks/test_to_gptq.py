"""The GPTQ checkpoint that peers are compared on is one that we read as what it was made of."""

from __future__ import annotations

from pathlib import Path

import torch

from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight
from benchmarks.to_gptq import convert
from tests.models.tiny import save_tiny_llama


def test_a_written_checkpoint_reads_as_the_rounded_weights(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "hf", intermediate_size=128)
    convert(tmp_path / "hf", tmp_path / "gptq")
    checkpoint = open_checkpoint(tmp_path / "gptq")
    assert (checkpoint.report.format, checkpoint.report.bits, checkpoint.report.group_size) == ("gptq", 4, 64)
    names = [name for name, _ in model.named_modules() if name.endswith("proj")]
    assert len(names) == 14
    for name in names:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        read = checkpoint.linear(name)
        assert isinstance(read, QuantizedWeight)
        step = read.scales.repeat_interleave(64, 0).t()
        # Half a step of rounding, and the scales' own float16.
        assert ((read.dequantize() - weight).abs() <= 0.51 * step).all()
    assert torch.equal(checkpoint.tensor("model.norm.weight"), model.model.norm.weight)
    checkpoint.close()
