"""Where the tensors of a GGUF file lie: one after another, each at a multiple of the file's alignment.

A wrong type, size or offset in the header breaks that order (the rule is llama.cpp's, ggml/src/gguf.cpp), and is found
before other bytes are taken for weights. It knows places and sizes, not types or names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader


def check_layout(path: Path, reader: GGUFReader) -> None:
    """Raises CheckpointError naming the first tensor that is empty or does not lie where the one before it ends."""
    expected = int(reader.data_offset)
    for tensor in reader.tensors:
        size, place = int(tensor.n_bytes), int(tensor.data_offset)
        if size == 0 or place != expected:
            raise CheckpointError(
                f"{path.name}: tensor {tensor.name} has {size} bytes at byte {place}, some at byte {expected} were "
                "expected: the file is damaged, download it again"
            )
        expected = place + -(-size // reader.alignment) * reader.alignment
