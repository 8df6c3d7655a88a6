"""What is calibrated on and what is measured on: whole blocks of the text, and none of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import UsageError
from appliance.quantize.calibration import BLOCK_TOKENS, MAX_BLOCKS, read_calibration
from appliance.tokenizer import Tokenizer
from tests.appliance.tokenizer_files import save_byte_level_bpe, save_llama2


def test_the_text_that_comes_along_is_enough(tmp_path: Path) -> None:
    calibration = read_calibration(None, save_byte_level_bpe(tmp_path))
    assert len(calibration.blocks) > 20
    assert len(calibration.held_out) == (len(calibration.blocks) + len(calibration.held_out)) // 5
    assert all(len(block) == BLOCK_TOKENS for block in calibration.blocks + calibration.held_out)


def test_nothing_is_both_calibrated_and_measured_on(tmp_path: Path) -> None:
    text = "".join(f"{number:05}." for number in range(3000))
    (tmp_path / "text").write_text(text)
    calibration = read_calibration(tmp_path / "text", save_byte_level_bpe(tmp_path / "model"))
    assert not set(map(tuple, calibration.blocks)) & set(map(tuple, calibration.held_out))


def test_a_long_text_is_taken_from_its_whole_length(tmp_path: Path) -> None:
    lines = [f"{number:06}\n" for number in range(20000)]
    (tmp_path / "text").write_text("".join(lines))
    folder = save_byte_level_bpe(tmp_path / "model")
    calibration = read_calibration(tmp_path / "text", folder)
    assert len(calibration.blocks) + len(calibration.held_out) == MAX_BLOCKS
    assert "0198" in Tokenizer.load(folder).decode(calibration.held_out[-1])


def test_every_block_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello, hello! " * 500)
    calibration = read_calibration(tmp_path / "text", save_llama2(tmp_path / "model"))
    assert {block[0] for block in calibration.blocks} == {1}, "<s>"
    assert {block.count(1) for block in calibration.blocks} == {1}
    assert {len(block) for block in calibration.blocks} == {BLOCK_TOKENS}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"too short", "has 8 tokens, at least 1280 are needed"), (b"\xff\xfe", "is not UTF-8"), (None, "cannot be read")],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        read_calibration(tmp_path / "text", save_byte_level_bpe(tmp_path / "model"))
