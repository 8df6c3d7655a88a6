"""The appliance's own folder: reading back what was written is bit-identical, and half a folder is never a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.quant.checkpoint import Checkpoint, open_checkpoint
from appliance.quant.formats import canonical
from appliance.quant.formats.canonical import save_canonical
from appliance.quant.weight import QuantizedWeight
from tests.quant.gguf_writer import LARGE, mixed, weights, write_gguf
from tests.quant.writers import MODULE, gptq_config, gptq_tensors, pack, random_integers, write_folder

FIXTURES = Path(__file__).parent / "fixtures"


def gguf_checkpoint(folder: Path) -> Checkpoint:
    kinds = {name: Kind.Q4_1 for name in weights() if "_norm" not in name} | {"token_embd.weight": Kind.Q8_0}
    return open_checkpoint(write_gguf(folder / "m.gguf", weights(), kinds))


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    bits = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
    kind = bits.get(one.dtype, one.dtype)
    return one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.names() == other.names()
    for name in one.names():
        module = name.removesuffix(".weight")
        first = one.linear(module) if module != name else one.tensor(name)
        second = other.linear(module) if module != name else other.tensor(name)
        if isinstance(first, QuantizedWeight):
            assert isinstance(second, QuantizedWeight)
            assert (first.bits, first.group_size) == (second.bits, second.group_size)
            for field in ("codes", "scales", "offsets", "zeros", "perm"):
                assert same_bits(getattr(first, field), getattr(second, field)), (name, field)
        else:
            assert isinstance(second, Tensor)
            assert same_bits(first, second), name


@pytest.mark.parametrize("case", sorted(path.parent.name for path in FIXTURES.glob("*/model.safetensors")))
def test_packed_checkpoints_come_back_bit_identical(tmp_path: Path, case: str) -> None:
    checkpoint = open_checkpoint(FIXTURES / case)
    save_canonical(checkpoint, tmp_path / "out")
    assert_same(checkpoint, open_checkpoint(tmp_path / "out"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_beyond_fp16_come_back_bit_identical(tmp_path: Path, dtype: torch.dtype) -> None:
    codes, zeros, _ = random_integers(64, 32, 2)
    scales = torch.rand(2, 32).to(dtype) * 1e-6  # too small for fp16 to hold
    folder = write_folder(tmp_path / "in", gptq_tensors(codes, pack(zeros, 1), scales, None), gptq_config(32))
    checkpoint = open_checkpoint(folder)
    save_canonical(checkpoint, tmp_path / "out")
    assert_same(checkpoint, open_checkpoint(tmp_path / "out"))


def test_gguf_comes_back_bit_identical_and_says_where_it_is_from(tmp_path: Path) -> None:
    checkpoint = gguf_checkpoint(tmp_path)
    calls: list[tuple[int, int]] = []
    save_canonical(checkpoint, tmp_path / "out", lambda done, total: calls.append((done, total)))
    read = open_checkpoint(tmp_path / "out")
    assert_same(checkpoint, read)
    assert read.config == checkpoint.config
    assert read.report.describe() == "GGUF Q4_1 4-bit, group 32 (converted)"
    assert (read.report.format, read.report.bits, read.report.group_size) == ("canonical", 4, 32)
    assert calls == [(done, len(checkpoint.names())) for done in range(1, len(checkpoint.names()) + 1)]


@pytest.mark.parametrize("most", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K])
def test_a_mixed_gguf_comes_back_bit_identical(tmp_path: Path, most: Kind) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", *mixed(most, Kind.Q6_K), shape=LARGE))
    save_canonical(checkpoint, tmp_path / "out")
    read = open_checkpoint(tmp_path / "out")
    assert_same(checkpoint, read)
    assert read.report.describe().endswith(", other layers Q6_K (converted)")


def test_plain_and_mixed_tensors_and_odd_rows_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "_SHARD_BYTES", 64)  # several files
    tensors = {
        f"{MODULE}.weight": torch.randn(3, 5).bfloat16(),
        "model.norm.weight": torch.randn(5),
        "model.embed_tokens.weight": torch.randn(7, 5).half(),
    }
    checkpoint = open_checkpoint(write_folder(tmp_path / "in", tensors))
    save_canonical(checkpoint, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    read = open_checkpoint(tmp_path / "out")
    assert_same(checkpoint, read)
    assert read.report.describe() == "safetensors, not quantised (float16) (converted)"


def test_quantisation_keys_do_not_survive_the_conversion(tmp_path: Path) -> None:
    save_canonical(open_checkpoint(FIXTURES / "gptq_symmetric"), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    checkpoint = gguf_checkpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        save_canonical(checkpoint, tmp_path / "out", stop)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_folder_with_content_is_never_overwritten(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FIXTURES / "gptq_symmetric")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        save_canonical(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FIXTURES / "gptq_symmetric")

    def other_process(done: int, total: int) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()

    with pytest.raises(CheckpointError, match="cannot be created"):
        save_canonical(checkpoint, tmp_path / "out", other_process)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine").exists()


@pytest.mark.parametrize("missing", ["appliance.json", "weights-00000.safetensors", "config.json"])
def test_an_incomplete_copy_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    save_canonical(open_checkpoint(FIXTURES / "gptq_symmetric"), tmp_path / "out")
    (tmp_path / "out" / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2, 1 is read"),
        ({"modules": {}, "report": {}}, "damaged"),
        ({"modules": []}, "damaged"),
        ({"modules": {MODULE: {"bits": 4}}}, "damaged"),
        ({"modules": {"other": {"bits": 4, "rows": 128, "group_size": 32}}}, "names module other"),
        ({"modules": {MODULE: {"bits": 4, "rows": 64, "group_size": 32}}}, "does not agree"),
        ({"modules": {MODULE: {"bits": 4, "rows": 128, "group_size": 0}}}, "does not agree"),
        ({"modules": {MODULE: {"bits": 8, "rows": 128, "group_size": 32}}}, "does not agree"),
        ({"modules": {MODULE: {"bits": 4, "rows": float("inf"), "group_size": 32}}}, "damaged"),
    ],
)
def test_a_manifest_that_disagrees_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    save_canonical(open_checkpoint(FIXTURES / "gptq_symmetric"), tmp_path / "out")
    manifest = tmp_path / "out" / "appliance.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path / "out").linear(MODULE)
