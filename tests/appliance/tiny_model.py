"""A whole model folder, weights and tokenizer, that loads in a moment and says nothing sensible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.appliance.tokenizer_files import byte_level_bpe, save_byte_level_bpe

EXACT: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 200, "num_threads": 1}
"""Settings under which an answer does not depend on its neighbours."""


def save_tiny_model(folder: Path) -> Path:
    """256 tokens of context; greedy answers to different prompts differ."""
    from tests.models.tiny import save_tiny_llama

    save_byte_level_bpe(folder)
    tokenizer = byte_level_bpe()
    save_tiny_llama(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=tokenizer.token_to_id("<|im_end|>"))
    return folder
