"""The whole command on a tiny model: rounding for real, the packages' part by a stand-in."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance import LLM, SamplingParams
from appliance.errors import QuantizationError, UnsupportedModelError, UsageError
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.shards import ShardWriter
from appliance.quantize import run
from appliance.quantize.run import Request, quantize
from appliance.quantize.scheme import Scheme
from appliance.quantize.source import Source, open_source
from appliance.quantize.verify import verify
from tests.quantize.tiny_source import save_tiny_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_source(tmp_path_factory.mktemp("source"))


def silent(what: str, fraction: float) -> None:
    pass


def rounded(model: Path, out: Path, measure: bool = False) -> run.Outcome:
    return quantize(Request(str(model), out, Scheme("rtn", 4, 32), measure=measure), silent)


def test_a_rounded_model_is_a_standard_folder_that_runs(model: Path, tmp_path: Path) -> None:
    (model / "modeling_evil.py").write_text("raise SystemExit")
    outcome = rounded(model, tmp_path / "out", measure=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    first, self_test, weights, perplexity, warning = outcome.lines()
    assert self_test.startswith("self-test  ")
    assert "fault" not in self_test
    assert first == f"{tmp_path / 'out'}: GPTQ 4-bit, group 32, symmetric"
    assert weights.startswith("weights    14 compared, largest relative error 0.")
    assert warning == ("warning    rounded to nearest, without calibration: --method awq or gptq gives better answers")
    assert outcome.perplexities is not None
    before, after = outcome.perplexities
    assert 200 < before < 400, "a random model of 268 tokens knows nothing"
    assert 0.9 < after / before < 1.1
    assert before != after
    assert f"{before:.2f} before, {after:.2f} after, ratio {after / before:.3f}" in perplexity
    [output] = LLM(tmp_path / "out", num_kv_blocks=20).generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


def test_what_is_not_quantised_stays_as_it_was(model: Path, tmp_path: Path) -> None:
    rounded(model, tmp_path / "out")
    before, after = open_checkpoint(model), open_checkpoint(tmp_path / "out")
    assert before.names() == after.names()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(before.tensor(name), after.tensor(name))
        assert before.tensor(name).dtype == after.tensor(name).dtype


def test_what_is_wrong_is_told_before_anything_is_done(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "quantizing_python", lambda *_: pytest.fail("the environment was made"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"--method gptq needs an NVIDIA card.*--method awq.*--method rtn"):
        quantize(Request(str(model), out, Scheme("gptq", 4, 32)), silent)
    with pytest.raises(UsageError, match="has 192 inputs, which --group-size 128 does not divide"):
        quantize(Request(str(model), out, Scheme("awq", 4, 128)), silent)
    other = save_tiny_source(tmp_path / "other")
    with pytest.raises(UsageError, match="exists and is not empty"):
        quantize(Request(str(model), other, Scheme("awq", 4, 64)), silent)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not served"):
        quantize(Request(str(other), out, Scheme("awq", 4, 64)), silent)
    assert not out.exists()


def test_a_model_that_cannot_be_measured_can_be_quantised_without(tmp_path: Path) -> None:
    model = save_tiny_source(tmp_path / "model", max_position_embeddings=64)
    with pytest.raises(
        QuantizationError, match=r"of .*/model could not be measured: .*; --no-perplexity leaves it out"
    ):
        rounded(model, tmp_path / "out", measure=True)
    assert rounded(model, tmp_path / "out").perplexities is None


STAND_IN = """
import json, sys
from pathlib import Path
job = json.loads(sys.stdin.readline())
def send(**message): print(json.dumps(message), flush=True)
send(progress=["Quantising", 0.5])
{body}
"""


def with_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """A worker that does `body` in place of the packages."""
    worker = tmp_path / "worker.py"
    worker.write_text(STAND_IN.format(body=body))
    monkeypatch.setattr(run, "_WORKER", worker)
    monkeypatch.setattr(run, "quantizing_python", lambda *_: Path(sys.executable))


def test_the_worker_is_told_all_and_shows_what_it_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the weights where the view says, and the words that transformers 4.51 knows."""
    body = """
seen = dict(job, blocks=[len(block) for block in job["blocks"]])
seen["rope_theta"] = json.loads((Path(job["model"]) / "config.json").read_text())["rope_theta"]
seen["weights"] = (Path(job["model"]) / "model.safetensors").stat().st_size
send(error=json.dumps(seen))
"""
    with_stand_in(monkeypatch, tmp_path, body)
    shown: list[tuple[str, float]] = []
    request = Request(str(model), tmp_path / "out", Scheme("awq", 4, 64), measure=False)
    with pytest.raises(QuantizationError) as caught:
        quantize(request, lambda *step: shown.append(step))
    seen = json.loads(caught.value.message)
    assert (seen["method"], seen["bits"], seen["group_size"]) == ("awq", 4, 64)
    assert set(seen["blocks"]) == {256}
    assert seen["rope_theta"] == 10000.0
    assert seen["weights"] == (model / "model.safetensors").stat().st_size
    assert seen["out"] == str(tmp_path / "out.partial")
    assert ("Quantising", 0.5) in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker.py"]


def test_a_worker_that_dies_leaves_its_log_and_no_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_stand_in(
        monkeypatch, tmp_path, "(Path(job['out']) / 'model.safetensors').touch()\nraise MemoryError('32 GiB')"
    )
    with pytest.raises(QuantizationError, match=r"failed: MemoryError: 32 GiB \(the whole output is in .*/out\.log\)"):
        quantize(Request(str(model), tmp_path / "out", Scheme("awq", 4, 64), measure=False), silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.log", "worker.py"]


def test_a_full_disk_is_told_and_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(writer: ShardWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardWriter, "close", fail)
    with pytest.raises(UsageError, match=r"the disk of .*/out is full"):
        rounded(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def written(model: Path, tmp_path: Path) -> tuple[Source, Path]:
    rounded(model, tmp_path / "out")
    return open_source(str(model)), tmp_path / "out"


Q_PROJ = "model.layers.0.self_attn.q_proj"
LAYERS: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYERS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
CODES = [f"model.layers.1.{layer}.qweight" for layer in LAYERS]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        *((lambda t, name=name: {name: t[name].flip(0)}, "written with a relative error of 1") for name in CODES),
        (lambda t: {f"{Q_PROJ}.scales": t[f"{Q_PROJ}.scales"] * 2}, "relative error of 1"),
        (lambda t: {"lm_head.weight": t["lm_head.weight"] * torch.inf}, "lm_head.weight does not fit float16"),
        (lambda t: {"model.norm.weight": None}, "model.norm.weight was not written"),
        (lambda t: {"lm_head.weight": None}, "lm_head.weight was not written"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_found(
    written: tuple[Source, Path], damage: object, sentence: str
) -> None:
    source, folder = written
    assert verify(source, Scheme("rtn", 4, 32), folder).errors
    tensors = load_file(folder / "model.safetensors")
    tensors |= damage(tensors)  # type: ignore[operator]
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(QuantizationError, match=sentence):
        verify(source, Scheme("rtn", 4, 32), folder)


def test_another_scheme_than_the_one_asked_for_is_found(written: tuple[Source, Path]) -> None:
    source, folder = written
    with pytest.raises(QuantizationError, match="was not written as 128 x 192 with 4 bits in groups of 64"):
        verify(source, Scheme("rtn", 4, 64), folder)
