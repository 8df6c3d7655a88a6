"""A tiny unquantised model that every method can take: its layers have whole groups and whole words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.appliance.tokenizer_files import byte_level_bpe, save_byte_level_bpe
from tests.models.tiny import save_tiny


def save_tiny_source(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    tokenizer = byte_level_bpe()
    save_byte_level_bpe(folder, tokenizer_class="TokenizersBackend", extra_special_tokens=["<pad>"])
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    save_tiny(folder, family, **(settings | overrides))
    return folder
