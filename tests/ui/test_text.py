from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.ui.text import decode, encode

TRICKY = [
    "<I am x> <think>a</think> #include <stdio.h> <img src=x onerror=alert(1)>",
    "<think>\nhm\n</think>\n\nHello `<b>`",
    "\n<think>not finished",
    "implied reasoning\n</think>\nthe answer",
    "a < b and a<b, x -> y, <https://example.org>, <!-- note -->",
    "```html\n<b>bold</b>\n```\nand <b>not</b>",
    "It costs $5 to $10, but $a_1<b$ and $$x<y$$ are maths.",
]


@pytest.mark.parametrize("raw", TRICKY)
def test_decode_gives_back_what_was_encoded(raw: str) -> None:
    assert decode(encode(raw)) == raw


@given(
    st.lists(st.sampled_from([*"<>`$~ \n\tab1/!?", "```", "    ", "- ", "<think>", "</think>", "\n\n"])).map("".join)
)
def test_every_mixture_of_markup_comes_back(raw: str) -> None:
    assert decode(encode(raw)) == raw


def test_no_tag_survives_outside_code_and_folds() -> None:
    shown = encode(TRICKY[0])
    assert "<" not in shown
    assert "&#0060;img src=x onerror=alert(1)>" in shown


@pytest.mark.parametrize(
    "code",
    [
        "`<b>`",
        "``a ` <b>``",
        "```\n<b>\n```",
        "~~~c\n#include <a.h>\n~~~\n",
        "- x\n  ```\n  <b>\n  ```",
        "x\n\n    <b>",
    ],
)
def test_code_is_left_alone(code: str) -> None:
    assert encode(code) == code


def test_indented_text_of_a_list_is_not_code() -> None:
    assert encode("1. one\n\n    <b>") == "1. one\n\n    &#0060;b>"


def test_a_fence_that_ends_gives_prose_back() -> None:
    assert encode("```\n<a>\n```\n<b>") == "```\n<a>\n```\n&#0060;b>"


def test_only_a_leading_reasoning_block_is_folded() -> None:
    assert encode("<think>a</think>b").startswith('<details class="reasoning">')
    assert "<details" not in encode("b <think>a</think>")
    assert " open>" in encode("<think>a")


def test_a_fold_that_could_not_end_is_not_made() -> None:
    assert "<details" not in encode("<think>```\ncode</think>answer")


def test_prices_are_not_maths() -> None:
    assert encode("$5 and $10, $5-$10") == "$5 and $10, $5-$10"
    assert encode("$x$") == r"\({}x\)"
