"""What a model folder says about generating: the tokens there are, those that end an answer, the sampling its makers
suggest.

Reads generation_config.json, config.json, tokenizer_config.json and the tokens of tokenizer.json. Standard library
only: the engine process needs the tokens' numbers and has no tokenizer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from appliance.errors import InvalidRequestError
from appliance.sampling_params import SamplingParams

log = logging.getLogger(__name__)

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder; empty where there is none. Whoever loads the model reports damaged files."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _added_tokens(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    entries = tokenizer.get("added_tokens")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def eos_token_ids(model: str | Path) -> tuple[int, ...]:
    """Every token that ends an answer: those of generation_config.json, of config.json and its text_config (an integer
    or a list), and the tokenizer's own eos_token. Chat models often have two.
    """
    folder = Path(model)
    found: set[int] = set()
    config = _read(folder, "config.json")
    text = config.get("text_config")
    for section in (_read(folder, "generation_config.json"), config, text if isinstance(text, dict) else {}):
        value = section.get("eos_token_id")
        found.update(i for i in (value if isinstance(value, list) else [value]) if type(i) is int and i >= 0)
    token = _read(folder, "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content:
        added = _added_tokens(_read(folder, "tokenizer.json"))
        found.update(entry["id"] for entry in added if entry.get("content") == content)
    return tuple(sorted(found))


def tokenizer_vocab_size(model: str | Path) -> int | None:
    """One more than the highest token id of tokenizer.json, its added tokens included; None where it names no tokens.

    An embedding often has more rows, for speed: no text belongs to those.
    """
    tokenizer = _read(Path(model), "tokenizer.json")
    section = tokenizer.get("model")
    vocab = section.get("vocab") if isinstance(section, dict) else None
    ids = [entry.get("id") for entry in _added_tokens(tokenizer)]
    if isinstance(vocab, dict):
        ids += vocab.values()
    elif isinstance(vocab, list):  # of Unigram: [token, score] in order of id
        ids.append(len(vocab) - 1)
    return max((token for token in ids if isinstance(token, int)), default=-1) + 1 or None


def default_sampling(model: str | Path) -> dict[str, float]:
    """temperature, top_p, top_k, min_p and repetition_penalty of generation_config.json, as far as it names them; an
    explicit `do_sample: false` is temperature 0. A value that no request could ask for is left out, with a warning.
    """
    config = _read(Path(model), "generation_config.json")
    if config.get("do_sample") is False:
        config["temperature"] = 0.0
    found = {}
    for key in SAMPLING_KEYS:
        value: Any = config.get(key)
        if value is None:
            continue
        if key == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            wish: dict[str, Any] = {key: value}
            SamplingParams(**wish)
        except InvalidRequestError as error:
            log.warning("generation_config.json of %s suggests what cannot be used, it is ignored: %s", model, error)
        else:
            found[key] = value
    return found
