"""Small real tokenizers, written as a model folder holds them. No test downloads one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_bpe() -> Tokenizer:
    """As GPT-2's and Qwen's: 256 byte tokens (0 to 255), some merges, then special tokens. No BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("l", "d")]
    merges.append(("Ġwor", "ld"))
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<pad>")])
    return tokenizer


def llama2() -> Tokenizer:
    """As Llama 2's: spaces are U+2581, unknown characters fall back to bytes, a BOS is put in front."""
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    characters = [*"▁abcdefghijklmnopqrstuvwxyzABCDEFGH,.!?", "▁h", "▁he", "ll", "▁hell", "▁▁", "▁▁▁▁"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {token: index for index, token in enumerate([*special, *byte_tokens, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*special, "<pad>"]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_byte_level_bpe(folder: Path, **config: Any) -> Path:
    """A folder that LocalClient can serve, with a ChatML template."""
    return save(folder, byte_level_bpe(), **{"eos_token": "<|im_end|>", "chat_template": CHATML} | config)


def save_llama2(folder: Path, **config: Any) -> Path:
    return save(folder, llama2(), **{"bos_token": "<s>", "eos_token": "</s>"} | config)
