"""The tokenizer of a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from appliance.errors import CheckpointError
from appliance.tokenizer import Tokenizer
from tests.appliance import tokenizer_files


def test_text_survives_a_round_trip(tmp_path: Path) -> None:
    text = "hello world, 世界 🙂\r\n\ttab"
    tokenizer = Tokenizer.load(tokenizer_files.save_byte_level_bpe(tmp_path))
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_raw_text_gets_the_bos_that_the_tokenizer_wants(tmp_path: Path) -> None:
    """Llama's post-processor puts one, the byte-level one has none; rendered text gets none ever."""
    llama = Tokenizer.load(tokenizer_files.save_llama2(tmp_path / "llama"))
    assert llama.encode_text("hell")[:1] == [llama.bos_token_id]
    assert llama.encode_text("hell")[1:] == llama.encode_rendered("hell")
    bpe = Tokenizer.load(tokenizer_files.save_byte_level_bpe(tmp_path / "bpe"))
    assert bpe.encode_text("hello") == bpe.encode_rendered("hello")


@pytest.mark.parametrize("wanted", [True, False])
def test_add_bos_token_in_the_configuration_wins(tmp_path: Path, wanted: bool) -> None:
    tokenizer = Tokenizer.load(tokenizer_files.save_llama2(tmp_path, add_bos_token=wanted))
    assert tokenizer.encode_text("hell").count(1) == int(wanted)


def test_fewest_tokens_is_a_lower_bound_that_needs_no_encoding(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_files.save_byte_level_bpe(tmp_path))
    for text in ("", "hello world", "世界 🙂" * 9, "<|im_end|>" * 5, " " * 64):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode_text(text))
    assert tokenizer.fewest_tokens("a" * 1_000_000) > 10_000


def test_special_tokens_in_the_text_are_recognised(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_files.save_byte_level_bpe(tmp_path))
    end = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.encode_text("hello<|im_end|>")[-1] == end


def test_truncation_and_padding_of_a_training_run_are_off(tmp_path: Path) -> None:
    backend = tokenizer_files.byte_level_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(tokenizer_files.save(tmp_path, backend))
    assert len(tokenizer.encode_text("x" * 100)) == 100
    assert len(tokenizer.encode_text("x")) == 1


def test_special_tokens_may_be_objects_and_live_in_their_own_file(tmp_path: Path) -> None:
    tokenizer_files.save_llama2(tmp_path, bos_token={"content": "<s>", "lstrip": False}, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    special = Tokenizer.load(tmp_path).special_tokens
    assert special == {"bos_token": "<s>", "pad_token": "<pad>"}


def test_a_folder_without_tokenizer_json_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    tokenizer_files.save_byte_level_bpe(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("build", [tokenizer_files.byte_level_bpe, tokenizer_files.llama2])
@pytest.mark.parametrize("text", ["hello world", "  a  b\n\n", "世界🙂 नमस्ते", "<pad>hello<pad> he"])
def test_the_bytes_of_tokens_joined_are_the_text(build: Callable[[], tokenizers.Tokenizer], text: str) -> None:
    tokenizer = Tokenizer(build(), {})
    token_ids = tokenizer.encode_rendered(text)
    found = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
    # Llama's tokenizer puts a space before the first word; its decoder takes it away again.
    if build is tokenizer_files.llama2:
        found = found.removeprefix(b" ")
    assert found.decode() == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_every_byte_has_a_token_that_says_so() -> None:
    tokenizer = Tokenizer(tokenizer_files.byte_level_bpe(), {})
    assert sorted(tokenizer.token_bytes(token_id) for token_id in range(256)) == [bytes([n]) for n in range(256)]
    llama = Tokenizer(tokenizer_files.llama2(), {})
    assert [llama.token_bytes(3 + n) for n in range(256)] == [bytes([n]) for n in range(256)]
    assert tokenizer.token_bytes(10**6) == b""
