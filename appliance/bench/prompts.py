"""Prompts for load: plain words, other ones from the first on for every seed and request: no prefix cache helps."""

from __future__ import annotations

import random
from dataclasses import dataclass

from appliance.errors import UsageError

# Common enough to be one token each, with the space before, in the vocabularies of today's models.
_TEXT = (
    "the cat sat on a mat while rain fell over old stone roofs and people walked home slowly through quiet streets of "
    "town where light from every window made small gold squares in water that ran down to sea past trees fields walls "
    "open doors long tables warm bread cold milk new books paper letters green hills white birds black horses red fire"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from low to high, both included, each equally likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> Range:
        """`128` or `100-2000`. Raises UsageError naming the option."""
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise UsageError(f"{name} {text!r} is not a length: write a number or a range, e.g. 128 or 100-2000")
        found = cls(int(low), int(high) if dash else int(low))
        if not 1 <= found.low <= found.high:
            raise UsageError(f"{name} {text!r} is not a length: at least 1, and the smaller number first")
        return found

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def prompt_and_length(seed: int, index: int, prompt_words: Range, output_tokens: Range) -> tuple[str, int]:
    """The prompt of request `index` of a run, and how many tokens its answer may have. The same at every call."""
    source = random.Random(f"{seed}/{index}")
    words = source.choices(_WORDS, k=prompt_words.draw(source))
    return " ".join(words), output_tokens.draw(source)
