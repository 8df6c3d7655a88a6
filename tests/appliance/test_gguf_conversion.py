"""What of a .gguf file is not weights: its tokenizer. And how the converting process tells what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf_conversion import convert_in_subprocess, save_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<pad>"]


def write_tokenizer(path: Path, split: str | None) -> Path:
    """A GGUF file that holds a byte-level tokenizer with one merge, of two spaces, and no tensors."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list([*SPECIAL, *alphabet, "ĠĠ"])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(alphabet) + 1))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("split", "tokens"),
    [
        ("smollm", ["ĠĠ", "1", "2"]),  # digits stand alone, so the spaces before them stay together
        ("gpt-2", ["Ġ", "Ġ", "1", "2"]),  # the last space belongs to the number
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, split: str, tokens: list[str]) -> None:
    save_tokenizer(write_tokenizer(tmp_path / "model.gguf", split), tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("  12").tokens == tokens


def test_special_tokens_and_the_chat_template_are_kept(tmp_path: Path) -> None:
    save_tokenizer(write_tokenizer(tmp_path / "model.gguf", "gpt-2"), tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    encoding = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("<|im_start|>a<|im_end|>")
    assert [encoding.ids[0], encoding.ids[-1]] == [0, 1]
    assert "messages[0]" in (tmp_path / "chat_template.jinja").read_text()


def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="splits text the way 'novel', which is not known here"):
        save_tokenizer(write_tokenizer(tmp_path / "model.gguf", "novel"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(CheckpointError, match=r"model\.gguf") as refused:
        convert_in_subprocess(tmp_path / "model.gguf", tmp_path / "model", lambda what, fraction: None)
    assert "\n" not in refused.value.message
    assert not (tmp_path / "model").exists()
