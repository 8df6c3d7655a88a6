"""The built-in model as auto-gptq's and autoawq's packers write it (write_packed.py): every weight, and an answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from appliance import LLM, SamplingParams
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.weight import QuantizedWeight

pytestmark = pytest.mark.packers

# Case -> what describe() says.
CASES = {
    "gptq_symmetric": "GPTQ 4-bit, group 32, symmetric",
    "gptq_asymmetric": "GPTQ 4-bit, group 32, asymmetric",
    "gptq_act_order": "GPTQ 4-bit, group 32, symmetric, act-order",
    "awq_gemm": "AWQ 4-bit, group 32, asymmetric",
}
MODULES = 210


@dataclass(frozen=True)
class Packed:
    case: str
    model: Path
    expected: Path


@pytest.fixture(scope="module")
def half(folder: Path) -> Iterator[Path]:
    """The built-in model in fp16, as Hugging Face names its parts. Hundreds of megabytes, so not in pytest's folder."""
    with TemporaryDirectory() as name:
        out = Path(name) / "half"
        shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "appliance.json", ".complete"))
        checkpoint = open_checkpoint(folder)
        weights = {name: checkpoint.tensor(name).half().contiguous() for name in checkpoint.names()}
        checkpoint.close()
        save_file(weights, out / "model.safetensors")
        yield out


@pytest.fixture(scope="module", params=CASES)
def packed(request: pytest.FixtureRequest, half: Path) -> Iterator[Packed]:
    python = os.environ.get("PACKERS_PYTHON")
    assert python, "set PACKERS_PYTHON to the Python of an environment with the dependency group `quantize`"
    with TemporaryDirectory() as name:
        script = Path(__file__).with_name("write_packed.py")
        subprocess.run([python, script, half, name, request.param], check=True, timeout=300)
        yield Packed(request.param, Path(name) / "model", Path(name) / "expected.safetensors")


def lost_words(packed: Packed) -> dict[str, Tensor]:
    """Module -> bool [G, N/8]: words of zero points that auto-gptq destroys: one of the eight, not the last, is 0."""
    lost = {}
    with safe_open(packed.expected, "pt") as expected:
        for name in sorted(name for name in expected.keys() if name.endswith(".zeros")):  # noqa: SIM118
            zeros = expected.get_tensor(name)
            words = (zeros.view(zeros.shape[0], -1, 8)[:, :, :-1] == 0).any(-1)
            lost[name.removesuffix(".zeros")] = words if packed.case.startswith("gptq") else torch.zeros_like(words)
    return lost


def test_the_format_and_the_zero_points_that_were_destroyed_are_reported(packed: Packed) -> None:
    report = open_checkpoint(packed.model).report
    assert report.describe() == CASES[packed.case]
    lost = {module: int(words.sum()) for module, words in lost_words(packed).items() if bool(words.any())}
    assert bool(lost) == (packed.case == "gptq_asymmetric")
    if lost:
        [warning] = report.warnings
        assert f"{sum(lost.values())} words" in warning
        assert f"{next(iter(lost))}.qzeros" in warning
    else:
        assert report.warnings == ()


def test_every_weight_is_the_packers_own_exactly_but_for_zero_points_that_were_destroyed(packed: Packed) -> None:
    checkpoint = open_checkpoint(packed.model)
    lost = lost_words(packed)
    assert len(lost) == MODULES
    with safe_open(packed.expected, "pt") as expected:
        for module, words in lost.items():
            weight = checkpoint.linear(module)
            assert isinstance(weight, QuantizedWeight)
            ours, theirs = weight.dequantize().t(), expected.get_tensor(f"{module}.dequantized")
            if bool(words.any()):
                intact = ~words.repeat_interleave(8, 1).repeat_interleave(weight.group_size, 0)
                ours, theirs = ours[intact], theirs[intact]
            assert torch.equal(ours, theirs), module
    checkpoint.close()


def test_the_checkpoint_answers(packed: Packed) -> None:
    llm = LLM(packed.model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in answer.outputs[0].text
