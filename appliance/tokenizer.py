"""Text to token ids and back, by a model folder's tokenizer.json.

Uses the tokenizers library directly: transformers' AutoTokenizer imports torch, takes seconds and can run a model
folder's Python; the front process needs none of that. Knows no chat templates and no streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from appliance.errors import CheckpointError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers (GPT-2's) write bytes as: Latin-1's printable ones, then U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A loaded tokenizer. Immutable; may be used from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """config is what tokenizer_config.json holds, as far as it is known."""
        backend.no_truncation()  # both are settings of somebody's training run
        backend.no_padding()
        self._backend = backend
        self.special_tokens = _special_tokens(config)
        """Role, such as bos_token, to token. Chat templates read them by these names."""
        bos_token = self.special_tokens.get("bos_token")
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        # tokenizer_config.json's add_bos_token, where present, replaces tokenizer.json's own rule, as in transformers.
        self._add_bos_token: bool | None = config.get("add_bos_token")
        self._longest_token = max(map(len, backend.get_vocab()), default=1)
        self._bytes: dict[int, bytes] = {}
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read a model folder's tokenizer. Raises CheckpointError if there is none that can be used."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json, the only form of tokenizer that is read here: "
                "add it (transformers' save_pretrained writes it)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise CheckpointError(f"{path} cannot be read ({error}): fetch the file again") from error
        config = read_json(folder, "special_tokens_map.json") | read_json(folder, "tokenizer_config.json")
        return cls(backend, config)

    def encode_text(self, text: str) -> list[int]:
        """Tokenize raw text, with a BOS if the tokenizer wants one. Special tokens in the text are recognised."""
        if self._add_bos_token is None:
            return self._backend.encode(text, add_special_tokens=True).ids
        bos = [self.bos_token_id] if self._add_bos_token and self.bos_token_id is not None else []
        return bos + self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokenize text that holds all of its special tokens already, as a rendered chat does: none is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def fewest_tokens(self, text: str) -> int:
        """What the text encodes to at least, at no cost: no token stands for more characters than the longest has."""
        return -(-len(text) // self._longest_token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids without a token have none."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether decode would look at the token at all."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text it stands inside of. Ids without a token add nothing."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        # The second of two keeps the space that some decoders strip off the start of a text.
        alone = self.decode([token_id], skip_special_tokens=False)
        text = self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]
        if _REPLACEMENT not in text:
            return text.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return text.encode()


def read_json(folder: str | Path, name: str) -> dict[str, Any]:
    """An object file of a model folder, empty if there is none. Raises CheckpointError if it is something else."""
    path = Path(folder) / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, an object is expected: fetch it again")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Each is written as a string or, with its stripping rules, as an object."""
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            tokens[name] = token
    return tokens
