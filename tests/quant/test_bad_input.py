"""Malformed and hostile folders: every one ends in a CheckpointError that names the file and what was found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.errors import ApplianceError, CheckpointError, UnsupportedModelError
from appliance.quant.checkpoint import open_checkpoint
from tests.quant.writers import MODULE, gptq_config, gptq_tensors, pack, random_integers, write_folder

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound plain model."""
    return write_folder(tmp_path / "model", {f"{MODULE}.weight": torch.ones(8, 4), "model.norm.weight": torch.ones(4)})


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    return raised.value.message


def test_a_path_that_is_no_model(folder: Path) -> None:
    assert "does not exist, a model folder or a .gguf file was expected" in refused(folder / "nothing")
    assert "is a file, a model folder or a .gguf file" in refused(folder / "model.safetensors")
    assert "cannot be read (File name too long)" in refused(Path("x" * 5000))


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_pickled_weights_are_refused_unread(folder: Path, suffix: str) -> None:
    (folder / "model.safetensors").rename(folder / f"pytorch_model.{suffix}")
    with pytest.raises(UnsupportedModelError, match=rf"pytorch_model\.{suffix}.*convert the model to safetensors"):
        open_checkpoint(folder)


def test_code_in_a_model_folder_never_runs(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    open_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


def test_an_empty_folder_and_one_with_only_gguf_say_what_to_do(tmp_path: Path) -> None:
    assert "holds no weights" in refused(tmp_path)
    (tmp_path / "m.gguf").touch()
    assert "give the path of the .gguf file itself" in refused(tmp_path)


def test_several_files_without_an_index_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    assert "2 safetensors files (a.safetensors, b.safetensors) and no model.safetensors.index.json" in refused(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "..",
        "",
        "a/b.safetensors",
        "..\\m.safetensors",
        3,
        None,
        "x\0.safetensors",
        "\ud800.safetensors",
        "x" * 300 + ".safetensors",
    ],
)
def test_an_index_leads_nowhere_but_into_its_folder(folder: Path, shard: Any) -> None:
    (folder.parent / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    message = refused(folder)
    assert "model.norm.weight" in message
    assert "not a plain file name" in message


def test_an_index_of_pickles_is_refused(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "pytorch_model.bin"}}))
    (folder / "pytorch_model.bin").touch()
    assert "only .safetensors files are read" in refused(folder)


def test_a_missing_shard_and_a_missing_tensor_are_named(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}))
    assert "model-2.safetensors is missing" in refused(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model.safetensors"}}))
    assert "places tensor lm_head.weight in model.safetensors, which does not hold it" in refused(folder)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", ""])
def test_an_index_without_a_map_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert INDEX in refused(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"group_size": ,}',
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"hidden_size": ' + b"9" * 5000 + b"}",
        b"[" * 99999,
    ],
)
def test_json_that_is_none_is_refused_by_file(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    assert "config.json" in refused(folder)


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json is missing" in refused(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 1 << 40),
        ("hidden_size", -1),
        ("hidden_size", 0),
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 10**7),
        ("vocab_size", 1 << 60),
        ("max_position_embeddings", 1 << 50),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-5),
        ("rope_theta", float("inf")),
        ("rope_theta", 0),
        ("text_config", {"hidden_size": 1 << 40}),
        ("text_config", []),
        ("quantization_config", []),
        ("quantization_config", {"quant_method": 4}),
    ],
)
def test_absurd_numbers_are_refused_by_key(folder: Path, key: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    message = refused(folder)
    assert "config.json" in message
    assert key in message or "hidden_size" in message or "quant_method" in message


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_a_quantisation_file_that_is_no_json_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).write_text('{"group_size": ,')
    assert name in refused(folder)


def test_a_safetensors_file_cut_anywhere_is_refused_by_name(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        message = refused(folder)
        assert "model.safetensors" in message
        assert str(length) in message


@pytest.mark.parametrize(
    "header",
    [
        {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 60]}},
        {"a.weight": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}},
        {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a.weight": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a.weight": {"dtype": "X99", "shape": [2], "data_offsets": [0, 8]}},
        {"a.weight": 3},
        [],
    ],
)
def test_a_header_that_lies_is_refused_by_file(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "model.safetensors" in refused(folder)


def test_a_header_length_beyond_the_file_says_both(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    message = refused(folder)
    assert str(1 << 63) in message
    assert "10 bytes" in message


def test_random_damage_ends_in_an_error_of_ours_or_a_model(tmp_path: Path) -> None:
    codes, zeros, scales = random_integers(64, 32, 2)
    tensors = gptq_tensors(codes, pack(zeros, 1), scales, torch.arange(64) // 32)
    folder = write_folder(tmp_path, tensors, gptq_config(32))
    generator = random.Random(0)
    refusals = 0
    for name, count in (("model.safetensors", 200), ("config.json", 200)):
        whole = (folder / name).read_bytes()
        for _ in range(count):
            damaged = bytearray(whole)
            for _ in range(2):
                damaged[generator.randrange(min(len(whole), 400))] = generator.randrange(256)
            (folder / name).write_bytes(damaged)
            try:
                checkpoint = open_checkpoint(folder)
                for parameter in checkpoint.names():
                    checkpoint.tensor(parameter)
            except ApplianceError:
                refusals += 1
        (folder / name).write_bytes(whole)
    assert refusals > 100
