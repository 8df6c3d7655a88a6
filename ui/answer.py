"""One answer while it is made: text, counts and times, and the line under it that tells them."""

from __future__ import annotations

import html
import time
from dataclasses import dataclass, field

from appliance.client import FinishReason, RequestStream, Usage

NOTE = '<div class="answer-note'
"""How the HTML of a note starts; text never does, for `appliance.ui.text` encodes its angle brackets."""
WAITING = f'{NOTE} answer-waiting">Waiting for the first token</div>'


def error_note(message: str) -> str:
    return f'{NOTE} answer-error" role="alert">{html.escape(" ".join(message.split()))}</div>'


@dataclass(slots=True)
class Answer:
    """Times are seconds of `time.perf_counter`."""

    submitted: float = field(default_factory=time.perf_counter)
    parts: list[str] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    """Why the engine gave the request up."""
    first_token: float = 0.0
    first_count: int = 0
    last_token: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.parts)

    async def read(self, stream: RequestStream) -> None:
        """Follow the stream to its end. Raises what the stream raises."""
        async for output in stream:
            self.parts.append(output.text)
            self.usage, self.finish_reason, self.error = output.usage, output.finish_reason, output.error
            self.last_token = time.perf_counter()
            if not self.first_token and output.token_ids:
                self.first_token, self.first_count = self.last_token, output.usage.completion_tokens

    def note(self) -> str:
        """Tokens, tokens/s after the first output, time to it, prompt tokens, and an end that was not the model's."""
        facts: list[str] = []
        if self.usage is not None:
            count = self.usage.completion_tokens
            facts.append(f"{count:,} {'token' if count == 1 else 'tokens'}")
            seconds = self.last_token - self.first_token
            if count > self.first_count and seconds > 0:
                facts.append(f"{(count - self.first_count) / seconds:.1f} tokens/s")
            facts.append(f"first token after {self.first_token - self.submitted:.2f} s")
            cached = f" ({self.usage.cached_tokens:,} cached)" if self.usage.cached_tokens else ""
            facts.append(f"prompt {self.usage.prompt_tokens:,} tokens{cached}")
        if self.finish_reason is FinishReason.LENGTH:
            facts.append("cut at the token limit")
        elif self.finish_reason in (None, FinishReason.ABORT):
            facts.append("stopped")
        return f'{NOTE}">{"".join(f"<span>{fact}</span>" for fact in facts)}</div>'
