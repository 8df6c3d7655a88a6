"""What a model folder says about generating."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from appliance.generation_config import default_sampling, eos_token_ids, tokenizer_vocab_size
from tests.appliance import tokenizer_files


def test_eos_ids_are_gathered_from_every_file(tmp_path: Path) -> None:
    """Llama 3 ends turns and texts with different tokens; a second one in generation_config.json must count."""
    tokenizer_files.save_byte_level_bpe(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 11, "text_config": {"eos_token_id": [13]}}))
    end = tokenizer_files.byte_level_bpe().token_to_id("<|im_end|>")
    assert eos_token_ids(tmp_path) == (7, 9, 11, 13, end)


def test_eos_may_be_declared_nowhere(tmp_path: Path) -> None:
    tokenizer_files.save_byte_level_bpe(tmp_path, eos_token=None)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(tmp_path) == ()


def test_default_sampling_is_the_makers_advice(tmp_path: Path) -> None:
    advice = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 20, "repetition_penalty": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    assert default_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps({**advice, "do_sample": False}))
    assert default_sampling(tmp_path) == {"temperature": 0.0, "top_k": 20, "top_p": 0.95}


def test_advice_that_no_request_could_follow_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = '{"temperature": NaN, "top_k": 50.0, "top_p": 5, "min_p": true, "repetition_penalty": 1e999}'
    (tmp_path / "generation_config.json").write_text(text)
    assert default_sampling(tmp_path) == {"top_k": 50}
    assert caplog.text.count("cannot be used") == 4


def test_eos_tokens_that_cannot_be_ids_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [True, -5, 7, "8", 2.0]}))
    assert eos_token_ids(tmp_path) == (7,)


def test_default_sampling_is_empty_without_the_file(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == {}


@pytest.mark.parametrize("save", [tokenizer_files.save_byte_level_bpe, tokenizer_files.save_llama2])
def test_vocabulary_is_that_of_the_tokenizer_with_its_added_tokens(tmp_path: Path, save: Any) -> None:
    save(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer_vocab_size(tmp_path) == tokenizer.get_vocab_size(with_added_tokens=True)


def test_vocabulary_of_a_unigram_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    tokenizer_files.save(tmp_path, tokenizer)
    assert tokenizer_vocab_size(tmp_path) == 3
    tokenizer.add_tokens(["<x>"])
    tokenizer_files.save(tmp_path, tokenizer)
    assert tokenizer_vocab_size(tmp_path) == 4


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": 3}', '{"model": {"vocab": 3}, "added_tokens": 5}'],
)
def test_vocabulary_of_no_tokens_is_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert tokenizer_vocab_size(tmp_path) is None
