"""What of a .gguf file is not weights: its tokenizer. And how the converting process tells what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.generation_config import eos_token_ids
from appliance.gguf_conversion import convert_in_subprocess, save_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<pad>"]


def write_tokenizer(
    path: Path,
    split: str | None,
    *,
    architecture: str = "llama",
    end_of_turn: int | None = None,
    begins: bool | None = None,
) -> Path:
    """A GGUF file that holds a byte-level tokenizer with merges of two spaces and of 12, and a token `whole` that
    no merge makes; and no tensors. begins: whether texts are said to begin with the first token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, architecture)
    if begins is not None:
        writer.add_add_bos_token(begins)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list([*SPECIAL, *alphabet, "ĠĠ", "12", "whole"])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(alphabet) + 3))
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sentencepiece(path: Path) -> Path:
    """A GGUF file that holds the tokenizer of Llama 2 and Mistral 7B in small: bytes, and pieces of a and b."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * 6])
    writer.add_token_scores([*[0.0] * 259, *(-float(rank) for rank in range(1, 7))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "split", "tokens"),
    [
        ("llama", "smollm", ["ĠĠ", "1", "2"]),  # digits stand alone, so the spaces before them stay together
        ("llama", "gpt-2", ["Ġ", "Ġ", "12"]),  # the last space belongs to the number
        ("llama", "llama-bpe", ["Ġ", "Ġ", "12"]),  # the last space stands alone
        ("qwen2", "qwen2", ["Ġ", "Ġ", "1", "2"]),  # and digits do
        ("qwen3", "qwen2", ["Ġ", "Ġ", "1", "2"]),
        ("mistral3", "tekken", ["Ġ", "Ġ", "1", "2"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, architecture: str, split: str, tokens: list[str]) -> None:
    save_tokenizer(write_tokenizer(tmp_path / "model.gguf", split, architecture=architecture), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("  12", add_special_tokens=False).tokens == tokens


@pytest.mark.parametrize(
    ("split", "begins", "tokens"),
    [
        ("llama-bpe", None, [SPECIAL[0], "whole"]),
        ("llama-bpe", False, ["whole"]),
        ("tekken", None, [SPECIAL[0], "whole"]),
        ("qwen2", None, ["w", "h", "o", "l", "e"]),
        ("qwen2", True, [SPECIAL[0], "w", "h", "o", "l", "e"]),
    ],
)
def test_how_texts_begin_and_which_pieces_stay_whole(
    tmp_path: Path, split: str, begins: bool | None, tokens: list[str]
) -> None:
    save_tokenizer(write_tokenizer(tmp_path / "model.gguf", split, begins=begins), tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("whole").tokens == tokens


def test_sentencepiece_text_begins_with_its_token_and_falls_back_to_bytes(tmp_path: Path) -> None:
    save_tokenizer(write_sentencepiece(tmp_path / "model.gguf"), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoding = tokenizer.encode("ab abé")
    assert encoding.tokens == ["<s>", "▁ab", "▁ab", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "ab abé"


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path: Path) -> None:
    save_tokenizer(write_tokenizer(tmp_path / "model.gguf", "llama-bpe", end_of_turn=0), tmp_path)
    assert eos_token_ids(tmp_path) == (0, 1)


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
