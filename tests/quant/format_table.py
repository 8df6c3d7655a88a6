"""The table of docs/formats.md, worked out from the fixtures: `python -m tests.quant.format_table` writes it anew.

A fixture is read, compared with what its writer makes of it itself, planned for a card and for a CPU, and run on the
CPU by the kernels that the plan names. A new fixture needs a line in WRITERS only if its writer is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from appliance.kernels.registry import LinearPlan, plan_linear
from appliance.kernels.spec import Phase, Target
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.formats.gguf_blocks import BLOCK_TYPES, read_blocks
from appliance.quant.linear import spec_of
from appliance.quant.self_test import BOUNDS, Reference, kernel_error
from appliance.quant.weight import QuantizedWeight

FIXTURES = Path(__file__).parent / "fixtures"
DOCUMENT = Path(__file__).parents[2] / "docs" / "formats.md"
BEGIN, END = "<!-- begin: python -m tests.quant.format_table -->", "<!-- end -->"
MODULE = "model.layers.0.mlp.up_proj"
# Beginning of a fixture's name -> who wrote it; the first that fits.
WRITERS = {"gptq_": "auto-gptq 0.7.1", "awq_": "autoawq 0.2.9", "compressed_tensors_": "compressed-tensors"}
CARD = Target("cuda", torch.float16, keep_dense=False)
# Without dense copies: with them, prefill runs through what the processor at hand offers.
HOST = Target("cpu", torch.bfloat16, keep_dense=False)
HEADINGS = ("format", "writer", "fixture", "weights", "kernel on a GPU", "kernels on a CPU", "outputs on a CPU")
_GGUF_ROWS, _GGUF_BLOCKS = 24, 16


def table() -> str:
    """The rows as Markdown."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *_fixture_rows(), *_gguf_rows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def documented() -> str:
    """What stands in the document."""
    return DOCUMENT.read_text().partition(BEGIN + "\n")[2].partition(END)[0]


def _fixture_rows() -> Iterator[tuple[str, ...]]:
    expected: dict[str, Tensor] = {}
    for file in sorted(FIXTURES.glob("expected*.safetensors")):
        expected |= load_file(file)
    for folder in sorted(path for path in FIXTURES.iterdir() if path.is_dir()):
        checkpoint = open_checkpoint(folder)
        weight = checkpoint.linear(MODULE)
        assert isinstance(weight, QuantizedWeight)
        # [K, N] of the packers' layers, or [N, K] as compressed-tensors reads it.
        theirs = expected[f"{folder.name}.dequantized"].t() if folder.name not in expected else expected[folder.name]
        writer = next(writer for start, writer in WRITERS.items() if folder.name.startswith(start))
        note = ": zero points that the writer lost, which a warning counts" if checkpoint.report.warnings else ""
        yield _row(checkpoint.report.describe(), writer, folder.name, weight, theirs, note)


def _gguf_rows() -> Iterator[tuple[str, ...]]:
    """Random bits, compared with the gguf package's dequantiser; blocks whose scales are not finite are left out."""
    for name, block in BLOCK_TYPES.items():
        size = gguf.GGML_QUANT_SIZES[Kind[name]][1]
        blocks = np.random.default_rng(0).integers(0, 256, (_GGUF_ROWS * _GGUF_BLOCKS * 2, size), dtype=np.uint8)
        with np.errstate(invalid="ignore"):
            values = np.array(gguf.quants.dequantize(blocks, Kind[name]))
        kept = np.isfinite(values).all(1).nonzero()[0][: _GGUF_ROWS * _GGUF_BLOCKS]
        weight = read_blocks(block, blocks[kept].reshape(_GGUF_ROWS, -1), name)
        theirs = torch.from_numpy(values[kept].reshape(_GGUF_ROWS, -1))
        yield _row(f"GGUF {name}", "gguf", "random blocks", weight, theirs)


def _row(
    description: str, writer: str, fixture: str, weight: QuantizedWeight, theirs: Tensor, note: str = ""
) -> tuple[str, ...]:
    differing = int((weight.dequantize(theirs.dtype) != theirs).sum())
    equal = "exact" if not differing else f"{differing} of {theirs.numel()} differ"
    plan = plan_linear(spec_of(weight), HOST)
    bound = BOUNDS[HOST.dtype]
    passes = _largest_error(plan, weight) <= bound
    on_card = " and ".join(plan_linear(spec_of(weight), CARD).kernel_names)
    on_host = " and ".join(plan.kernel_names)
    return description, writer, fixture, equal + note, on_card, on_host, f"within {bound:.3f}" if passes else "WRONG"


def _largest_error(plan: LinearPlan, weight: QuantizedWeight) -> float:
    reference = Reference.of(weight, HOST.dtype)
    kernels = {Phase.DECODE: plan.decode, Phase.PREFILL: plan.prefill}
    return max(kernel_error(entry.pack(weight, HOST.dtype), phase, reference) for phase, entry in kernels.items())


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}")
