"""Text to calibrate on and text to measure on: token blocks of one length, of a user's file or of the one here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.errors import UsageError
from appliance.tokenizer import Tokenizer

BLOCK_TOKENS = 256
MAX_BLOCKS = 160
"""128 to calibrate on, as both packages suggest, and 32 to measure on."""
FEW_TOKENS = 16384
"""Fewer than this calibrate, but a text of the user's own would do so better."""
_HELD_OUT = 5  # one block of so many is measured on and never calibrated on
_MAX_CHARACTERS = 4 << 20
_OWN_TEXT = Path(__file__).with_name("calibration.txt")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Blocks of BLOCK_TOKENS token ids, each with the tokenizer's BOS if it has one."""

    blocks: list[list[int]]
    held_out: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.blocks))


def read_calibration(file: Path | None, folder: Path) -> Calibration:
    """The text of `file` (UTF-8, its first 4 million characters), None: the text that comes with the appliance, in
    tokens of the model in `folder`.

    Raises UsageError where the file cannot be read or is too short, CheckpointError where there is no tokenizer.
    """
    try:
        with (file or _OWN_TEXT).open(encoding="utf-8") as stream:
            text = stream.read(_MAX_CHARACTERS)
    except OSError as error:
        raise UsageError(f"--calibration {file} cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--calibration {file} is not UTF-8 text ({error}): convert it to UTF-8") from error
    tokenizer = Tokenizer.load(folder)
    start = tokenizer.encode_text("")
    token_ids = tokenizer.encode_rendered(text)
    size = BLOCK_TOKENS - len(start)
    blocks = [start + token_ids[at : at + size] for at in range(0, len(token_ids) - size + 1, size)]
    if len(blocks) < _HELD_OUT:
        raise UsageError(
            f"--calibration {file} has {len(token_ids)} tokens, at least {_HELD_OUT * BLOCK_TOKENS} are needed: give a "
            "longer text, or leave it out for the one that comes with the appliance"
        )
    if len(blocks) > MAX_BLOCKS:  # spread over the whole text
        blocks = [blocks[index * len(blocks) // MAX_BLOCKS] for index in range(MAX_BLOCKS)]
    is_held_out = [index % _HELD_OUT == _HELD_OUT - 1 for index in range(len(blocks))]
    return Calibration(
        blocks=[block for block, held in zip(blocks, is_held_out, strict=True) if not held],
        held_out=[block for block, held in zip(blocks, is_held_out, strict=True) if held],
    )
