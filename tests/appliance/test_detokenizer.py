"""Incremental text equals the text of the whole; stop strings cut it in one place however it arrives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from appliance.client import FinishReason, RequestOutput, TokenLogprobs
from appliance.detokenizer import Detokenizer, IncrementalDecoder
from appliance.engine.request import StepOutput
from appliance.sampling_params import SamplingParams
from appliance.tokenizer import Tokenizer
from tests.appliance import tokenizer_files

BPE = Tokenizer(tokenizer_files.byte_level_bpe(), {})
LLAMA = Tokenizer(tokenizer_files.llama2(), {"bos_token": "<s>"})
BPE_SIZE, LLAMA_SIZE = tokenizer_files.byte_level_bpe().get_vocab_size(), tokenizer_files.llama2().get_vocab_size()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BPE, LLAMA], ids=["byte-level", "llama2"])
END = BPE.token_to_id("<|im_end|>")

TEXTS = [
    "hello world",
    "  two  spaces,\n\n  then\ttabs \r\n",
    "世界你好",
    "👩‍👩‍👧‍👦 and 🇩🇪 and ❤️",
    "नमस्ते दुनिया",
    "a世ab",
    "e\u0301 combined",
]


def additions(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


def answer(text: str, params: SamplingParams, *, group: int = 1, reason: FinishReason = FinishReason.LENGTH,
           tokenizer: Tokenizer = BPE, extra: tuple[int, ...] = ()) -> list[RequestOutput]:  # fmt: skip
    """The outputs for an answer whose tokens arrive `group` at a time."""
    token_ids = (*tokenizer.encode_rendered(text), *extra)
    detokenizer = Detokenizer(tokenizer, params)
    outputs = []
    for start in range(0, len(token_ids), group):
        is_last = start + group >= len(token_ids)
        step = StepOutput("r", token_ids[start : start + group], reason if is_last else None, None, 5, 2)
        if (output := detokenizer.push(step)) is not None:
            outputs.append(output)
        if detokenizer.is_finished:
            break
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


@TOKENIZERS
@pytest.mark.parametrize("text", TEXTS)
def test_joined_additions_are_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode_text(text)
    assert "".join(additions(tokenizer, token_ids)) == tokenizer.decode(token_ids) == text


@TOKENIZERS
@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_joined_additions_are_any_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode_rendered(text)
    assert "".join(additions(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, BPE_SIZE + 3), max_size=80), st.booleans())
def test_joined_additions_are_the_whole_of_any_bytes(token_ids: list[int], skip: bool) -> None:
    whole = BPE.decode(token_ids, skip_special_tokens=skip)
    assert "".join(additions(BPE, token_ids, skip_special_tokens=skip)) == whole


@settings(deadline=None)
@given(st.lists(st.integers(0, LLAMA_SIZE + 3), max_size=60), st.booleans())
def test_joined_additions_are_the_whole_of_any_valid_tokens(token_ids: list[int], skip: bool) -> None:
    """Where a run of byte tokens is broken, the library spoils its good characters too; they are kept here."""
    whole = LLAMA.decode(token_ids, skip_special_tokens=skip)
    joined = "".join(additions(LLAMA, token_ids, skip_special_tokens=skip))
    if "\ufffd" not in whole:
        assert joined == whole
    else:
        assert joined.replace("\ufffd", "").startswith(whole.partition("\ufffd")[0])


@settings(deadline=None)
@given(st.lists(st.sampled_from([*"é世🙂".encode(), 0xFF, 0x61]), min_size=40, max_size=120))
def test_long_runs_of_broken_bytes_lose_nothing(values: list[int]) -> None:
    byte_token = {ord(c): i for i, c in enumerate(sorted(_byte_characters()))}
    token_ids = [byte_token[ord(_byte_characters()[value])] for value in values]
    assert "".join(additions(BPE, token_ids)) == BPE.decode(token_ids) == bytes(values).decode(errors="replace")


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


def test_endless_garbage_keeps_the_window_short() -> None:
    decoder = IncrementalDecoder(BPE, skip_special_tokens=True)
    lone = BPE.encode_rendered("世")[0]
    text = "".join(decoder.push(lone) for _ in range(1000))
    assert len(text) > 950
    assert len(decoder._window) < 30


@TOKENIZERS
def test_no_replacement_character_is_shown_while_a_character_is_incomplete(tokenizer: Tokenizer) -> None:
    for addition in additions(tokenizer, tokenizer.encode_rendered("🙂世 a")):
        assert "\ufffd" not in addition


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    token_ids = BPE.encode_rendered("a世")[:-1]
    assert additions(BPE, token_ids) == ["a", "", "", "\ufffd"]


def test_spaces_survive_special_tokens() -> None:
    """Llama's decoder drops the leading space of whatever it sees first: that may only be the answer's first token."""
    words = LLAMA.encode_rendered("hell hell")
    pad = LLAMA.token_to_id("<pad>")
    assert pad is not None
    for token_ids in ([*words, pad, *words], [pad, pad, *words], [*words, *[pad] * 20, *words, 1, 1, *words]):
        for skip in (True, False):
            joined = "".join(additions(LLAMA, token_ids, skip_special_tokens=skip))
            assert joined == LLAMA.decode(token_ids, skip_special_tokens=skip)


def test_ids_without_a_token_have_no_text() -> None:
    assert additions(BPE, [10**6, *BPE.encode_rendered("hello"), 10**6]) == ["", "hello", "", ""]


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stop", "text", "expected", "reason"),
    [
        (("wor",), "hello world", "hello ", "wor"),
        (("lo wo",), "hello world", "hel", "lo wo"),
        (("世",), "a世b", "a", "世"),
        (("h",), "hello", "", "h"),
        (("nope", "d"), "hello world", "hello worl", "d"),
        (("xyz", "yz"), "wxyz", "w", "xyz"),
        (("abcd", "b"), "abcd", "a", "b"),
        (("aab",), "aaab", "a", "aab"),
        (("DEFGHIJ",), "DEFGHIJKL", "", "DEFGHIJ"),
    ],
)
def test_a_stop_string_cuts_in_one_place(
    group: int, stop: tuple[str, ...], text: str, expected: str, reason: str
) -> None:
    outputs = answer(text, SamplingParams(stop=stop), group=group)
    assert text_of(outputs) == expected
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, reason)


def test_the_start_of_a_stop_string_never_leaks() -> None:
    seen = ""
    for output in answer("abc<STOP>def", SamplingParams(stop=("<STOP>",))):
        seen += output.text
        assert "<" not in seen
    assert seen == "abc"


def test_held_text_is_flushed_when_no_stop_string_came() -> None:
    outputs = answer("abc<STO", SamplingParams(stop=("<STOP>",)))
    assert text_of(outputs) == "abc<STO"
    assert outputs[-1].text == "<STO"
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].stop_reason is None


def test_tokens_after_the_cut_are_neither_returned_nor_counted() -> None:
    outputs = answer("abcdef", SamplingParams(stop=("c",)), group=6)
    assert [token for output in outputs for token in output.token_ids] == BPE.encode_rendered("abc")
    assert outputs[-1].usage.completion_tokens == 3


def test_the_stop_string_is_shown_on_request() -> None:
    params = SamplingParams(stop=("lo w",), include_stop_str_in_output=True)
    assert text_of(answer("hello world", params)) == "hello w"


def test_stop_strings_are_ignored_in_the_text_of_the_first_min_tokens() -> None:
    """min_tokens counts tokens, the newlines made by the first three of which stop nothing."""
    assert text_of(answer("\n\n\na\nb", SamplingParams(stop=("\n",), min_tokens=3))) == "\n\n\na"
    assert text_of(answer("aXbX", SamplingParams(stop=("aX",), min_tokens=1))) == "aXbX"


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab世 ", max_size=30),
    stop=st.lists(st.text(alphabet="ab世 ", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 4),
    group=st.integers(1, 5),
)
def test_the_grouping_of_tokens_changes_nothing(text: str, stop: list[str], min_tokens: int, group: int) -> None:
    params = SamplingParams(stop=tuple(stop), min_tokens=min_tokens)
    one, many = answer(text, params), answer(text, params, group=group)
    assert text_of(one) == text_of(many)
    if one:
        assert one[-1].usage == many[-1].usage
        assert (one[-1].finish_reason, one[-1].stop_reason) == (many[-1].finish_reason, many[-1].stop_reason)
        if min_tokens == 0:
            ends = [text.find(s) + len(s) for s in stop if s in text]
            assert (one[-1].finish_reason is FinishReason.STOP) == bool(ends)


def test_the_end_of_sequence_token_shows_no_text_but_counts() -> None:
    assert END is not None
    for skip in (True, False):
        outputs = answer("hello", SamplingParams(skip_special_tokens=skip), reason=FinishReason.STOP, extra=(END,))
        assert text_of(outputs) == "hello"
        assert outputs[-1].usage.completion_tokens == 2
        assert outputs[-1].stop_reason is None


def test_a_stop_token_with_text_is_shown_on_request_only() -> None:
    stop_token = BPE.encode_rendered("X")[0]
    step = StepOutput("r", (*BPE.encode_rendered("hello"), stop_token), FinishReason.STOP, stop_token, 5, 0)
    for include, text in ((False, "hello"), (True, "helloX")):
        params = SamplingParams(stop_token_ids=(stop_token,), include_stop_str_in_output=include)
        output = Detokenizer(BPE, params).push(step)
        assert output is not None
        assert (output.text, output.stop_reason) == (text, stop_token)


def test_usage_is_cumulative_and_tokens_wait_for_their_text() -> None:
    outputs = answer("a世b", SamplingParams())
    assert [(o.text, len(o.token_ids), o.usage.completion_tokens) for o in outputs] == [
        ("a", 1, 1),
        ("世", 3, 4),
        ("b", 1, 5),
    ]
    assert (outputs[0].usage.prompt_tokens, outputs[0].usage.cached_tokens) == (5, 2)


def test_an_answer_that_ends_without_tokens_still_says_so() -> None:
    detokenizer = Detokenizer(BPE, SamplingParams())
    output = detokenizer.push(StepOutput("r", (), FinishReason.ERROR, None, 5, 0))
    assert output is not None
    assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.ERROR)


def test_the_llama2_tokenizer_here_behaves_as_the_real_one() -> None:
    """A lone token loses its leading space: what makes decoding token by token wrong."""
    backend: Backend = tokenizer_files.llama2()
    first, second = backend.encode("hell hell", add_special_tokens=False).ids
    assert backend.decode([first]) + backend.decode([second]) == "hellhell"


@pytest.mark.parametrize("group", [1, 2, 50])
def test_log_probabilities_stay_with_their_tokens(group: int) -> None:
    """Held back with half a character or half a stop string, and cut with what comes after the stop string."""
    token_ids = BPE.encode_rendered("世 hello world and more")
    [world] = BPE.encode_rendered(" world")
    detokenizer = Detokenizer(BPE, SamplingParams(stop=("world",), logprobs=0, prompt_logprobs=0))
    outputs: list[RequestOutput] = []
    for start in range(0, len(token_ids), group):
        part = tuple(token_ids[start : start + group])
        scored = tuple(TokenLogprobs(token_id, -1.0, ()) for token_id in part)
        prompt = (TokenLogprobs(7, -2.0, ()),) if start == 0 else ()
        if (output := detokenizer.push(StepOutput("r", part, None, None, 2, 0, scored, prompt))) is not None:
            outputs.append(output)
        if detokenizer.is_finished:
            break
    assert text_of(outputs) == "世 hello "
    assert [found.token_id for output in outputs for found in output.logprobs] == token_ids[
        : token_ids.index(world) + 1
    ]
    assert all([found.token_id for found in output.logprobs] == list(output.token_ids) for output in outputs)
    assert [len(output.prompt_logprobs) for output in outputs] == [1] + [0] * (len(outputs) - 1)
