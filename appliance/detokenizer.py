"""Tokens of one answer to text, as they come; stop strings are found on the way.

Knows nothing of processes and queues. The text depends on the tokens only, never on how they were grouped in steps, so
a streamed answer and a whole one are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.client import FinishReason, RequestOutput, TokenLogprobs, Usage
from appliance.engine.request import StepOutput
from appliance.sampling_params import SamplingParams
from appliance.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONG_WINDOW = 8
_LONG_PENDING = 16


class IncrementalDecoder:
    """The text that each further token adds. Joined, the additions are the decoding of the whole sequence.

    Decodes a window of the last few tokens and gives what is new in it. Characters whose bytes are incomplete decode to
    U+FFFD at the window's end; they are kept back until they are complete or the answer ends. A decoder may treat the
    first token of a sequence specially (Llama's drops its leading space), so a window always starts with tokens whose
    text has been given before, and tokens without text never enter it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._given = ""
        """The part of the window's text that has been given."""
        self._complete = 0
        """Tokens of the window up to the last place where its text was complete."""
        self._previous_complete = 0

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._given):
            # Byte-fallback decoders judge a run of byte tokens as a whole: a broken byte spoils its good neighbours.
            self._restart(self._complete)
            text = self._decode(self._window)
        stable = text.rstrip(_REPLACEMENT)
        addition = ""
        if len(stable) > len(self._given):
            addition = stable[len(self._given) :]
            self._given = stable
        if len(stable) == len(text):
            self._previous_complete, self._complete = self._complete, len(self._window)
            if len(self._window) > _LONG_WINDOW:
                self._slide()
        elif len(self._window) - self._complete > _LONG_PENDING:
            addition += self._give_garbage(text)
        return addition

    def flush(self) -> str:
        """The rest, at the end of the answer: an incomplete character becomes U+FFFD."""
        addition = self._decode(self._window)[len(self._given) :]
        self._given += addition
        return addition

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _restart(self, start: int) -> None:
        self._window = self._window[start:]
        self._given = ""
        self._previous_complete = self._complete = 0

    def _slide(self) -> None:
        """Forget all tokens but the last ones to have completed a text."""
        self._restart(self._previous_complete)
        self._given = self._decode(self._window)
        self._complete = len(self._window)

    def _give_garbage(self, text: str) -> str:
        """Cut a long run of bytes that are no text where it can be cut: no character spans the place."""
        for cut in range(len(self._window) - 1, len(self._window) - 5, -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if head + tail == text:
                addition = head[len(self._given) :]
                self._restart(cut)
                return addition
        return ""


class StopStrings:
    """Finds the first stop string in a growing text, and keeps back whatever may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._first_characters = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    def push(self, addition: str) -> tuple[str, str | None]:
        """Returns the text that is sure to precede any stop string, and the stop string found, if one is complete.

        Of several, the one complete first wins, then the longest: what a reader going by characters would find.
        """
        text = self._held + addition
        found = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if found:
            _, start, string = min(found)
            self._held = ""
            return text[:start], string
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters and self._may_begin(text[start:]):
                self._held = text[start:]
                return text[:start], None
        self._held = ""
        return text, None

    def flush(self) -> str:
        """What was kept back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, tail: str) -> bool:
        return any(string.startswith(tail) for string in self._strings)


class Detokenizer:
    """Turns the step outputs of one request into what its client gets."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop_strings = StopStrings(params.stop)
        self._num_tokens = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.is_finished = False

    def push(self, output: StepOutput) -> RequestOutput | None:
        """The increment to send, None while there is no new text to show. Nothing may be pushed after the last one.

        A stop string ends the answer whatever the engine says; then `is_finished` is true before the engine knows.
        Stop strings are not looked for in the text of the first min_tokens tokens. The token that ends an answer shows
        its text only with include_stop_str_in_output.
        """
        assert not self.is_finished, "a step output after the last one"
        reason = output.finish_reason
        stop_reason: str | int | None = output.stop_token
        hidden = 1 if reason is FinishReason.STOP and not self._params.include_stop_str_in_output else 0
        num_shown = len(output.token_ids) - hidden
        stop_string = None
        self._prompt_logprobs += output.prompt_logprobs
        for index, token_id in enumerate(output.token_ids):
            self._num_tokens += 1
            self._token_ids.append(token_id)
            self._logprobs += output.logprobs[index : index + 1]
            if index < num_shown:
                stop_string = self._add(self._decoder.push(token_id))
            if stop_string is not None:
                break
        if reason is not None and stop_string is None:
            stop_string = self._add(self._decoder.flush())
        if stop_string is not None:
            reason, stop_reason = FinishReason.STOP, stop_string
        elif reason is not None:
            self._text.append(self._stop_strings.flush())
        self.is_finished = reason is not None
        return self._take(output, reason, stop_reason)

    def _add(self, addition: str) -> str | None:
        """Returns the stop string that the addition completes."""
        if not addition:
            return None
        if self._num_tokens <= self._params.min_tokens:
            self._text.append(addition)
            return None
        text, stop_string = self._stop_strings.push(addition)
        self._text.append(text)
        if stop_string is not None and self._params.include_stop_str_in_output:
            self._text.append(stop_string)
        return stop_string

    def _take(
        self, output: StepOutput, reason: FinishReason | None, stop_reason: str | int | None
    ) -> RequestOutput | None:
        text, token_ids = "".join(self._text), tuple(self._token_ids)
        if not text and reason is None:
            return None
        logprobs, prompt_logprobs = tuple(self._logprobs), self._prompt_logprobs
        self._text.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        self._prompt_logprobs = ()
        usage = Usage(output.num_prompt_tokens, self._num_tokens, output.num_cached_tokens)
        error = output.error if reason is FinishReason.ERROR else ""
        return RequestOutput(text, token_ids, usage, reason, stop_reason, logprobs, prompt_logprobs, error)
