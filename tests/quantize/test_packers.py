"""autoawq and auto-gptq themselves, end to end on a CPU: what they write is a folder that everybody can load.

PACKERS_PYTHON is a Python with the dependency group `quantize`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from appliance.quant.checkpoint import open_checkpoint
from appliance.quantize import run
from appliance.quantize.run import Request, quantize
from appliance.quantize.scheme import Scheme
from tests.quantize.tiny_source import save_tiny_source

pytestmark = pytest.mark.packers

TEXT = "hello world, <|im_start|>hello<|im_end|> 123"
MESSAGES = [{"role": "user", "content": "hello"}]
ENCODE = f"""
import json, sys
from transformers import AutoConfig, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
config = AutoConfig.from_pretrained(sys.argv[1])
template = tokenizer.apply_chat_template({MESSAGES!r}, tokenize=False, add_generation_prompt=True)
print(json.dumps([tokenizer({TEXT!r})["input_ids"], template, config.rope_theta]))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return Path(os.environ["PACKERS_PYTHON"])


def give_channels_sizes(model: Path) -> None:
    """Columns of very different size, as real models have them: what AWQ scales by. Random ones are all alike."""
    torch.manual_seed(1)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensor *= torch.randn(tensor.shape[1]).exp()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def silent(what: str, fraction: float) -> None:
    pass


@pytest.mark.parametrize(
    ("family", "is_tied"), [("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", True)]
)
def test_autoawq_quantises_on_a_cpu(tmp_path: Path, python: Path, family: str, is_tied: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    model = save_tiny_source(tmp_path / "model", family, tie_word_embeddings=is_tied, rope_parameters=rope)
    give_channels_sizes(model)
    out = tmp_path / "out"
    shown: list[str] = []
    outcome = quantize(
        Request(str(model), out, Scheme("awq", 4, 32), python=python), lambda what, _: shown.append(what)
    )
    assert outcome.verdict.description == "AWQ 4-bit, group 32, asymmetric"
    assert max(outcome.verdict.errors.values()) < 0.15, "more than rounding costs: were weights scaled twice?"
    assert outcome.perplexities is not None
    before, after = outcome.perplexities
    assert 0.9 < after / before < 1.1
    assert "calibrated on " in outcome.warnings[0]
    assert shown.count("Quantising") == 2, "one for each layer"
    names = set(open_checkpoint(model).names())
    assert set(open_checkpoint(out).names()) == names
    assert ("lm_head.weight" in names) is not is_tied

    result = subprocess.run([python, "-I", "-c", ENCODE, out], capture_output=True, text=True, check=True)
    older = json.loads(result.stdout)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    template = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert older == [tokenizer(TEXT)["input_ids"], template, 50000.0]


@pytest.mark.parametrize(("family", "group_size"), [("llama", 32), ("qwen2", -1)])
def test_auto_gptq_is_called_as_it_wants(
    tmp_path: Path, python: Path, family: str, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_check_cuda", lambda: None)
    monkeypatch.setattr(run, "_WORKER", Path(__file__).with_name("gptq_on_cpu.py"))
    model = save_tiny_source(tmp_path / "model", family, num_key_value_heads=4)
    shown: list[str] = []
    scheme = Scheme("gptq", 4, group_size)
    outcome = quantize(Request(str(model), tmp_path / "out", scheme, python=python), lambda what, _: shown.append(what))
    group = "one group per column" if group_size == -1 else "group 32"
    assert outcome.verdict.description == f"GPTQ 4-bit, {group}, symmetric"
    assert outcome.perplexities is not None
    before, after = outcome.perplexities
    assert 0.9 < after / before < 1.1
    assert shown.count("Quantising") == 2
    assert open_checkpoint(tmp_path / "out").names() == open_checkpoint(model).names(), "no bias, no copy of a tensor"
