"""Log probabilities in the two forms of the OpenAI protocol: chat's list of tokens, and completions' parallel lists.

They are those of the model's own distribution, before penalties, biases and temperature.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from appliance.client import EngineClient, RequestOutput, TokenLogprobs


class LogprobsForm(Protocol):
    """How one choice's log probabilities are told. One object a choice; it gets the outputs in order, each once."""

    async def content(self, output: RequestOutput) -> dict[str, Any]:
        """The `logprobs` object for what is new in `output`."""


class ChatLogprobs:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}`.

    `bytes` are exact; `token` shows half a character as U+FFFD.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def content(self, output: RequestOutput) -> dict[str, Any]:
        known = await _bytes_of(self._client, output.logprobs)
        entries = [
            _entry(known, found.token_id, found.logprob)
            | {"top_logprobs": [_entry(known, *alternative) for alternative in found.top]}
            for found in output.logprobs
        ]
        return {"content": entries, "refusal": None}


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, with the prompt's where it is echoed.

    A position's `top_logprobs` always names its own token, so it may hold one more than asked for. `text_offset` counts
    characters of the token texts joined. The prompt's first token has no log probability: null.
    """

    def __init__(self, client: EngineClient, echoed: Sequence[int]) -> None:
        """`echoed` are the token ids of the prompt if it is told about, else empty."""
        self._client = client
        self._echoed = echoed
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    async def content(self, output: RequestOutput) -> dict[str, Any]:
        scored = [*output.prompt_logprobs, *output.logprobs]
        known = await _bytes_of(self._client, scored, self._echoed[:1])
        tokens: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id in self._echoed[:1]:
            tokens.append(_text(known[token_id]))
            offsets.append(self._advance(known[token_id]))
            values.append(None)
            tops.append(None)
        self._echoed = ()
        for found in scored:
            tokens.append(_text(known[found.token_id]))
            offsets.append(self._advance(known[found.token_id]))
            values.append(found.logprob)
            top: dict[str, float] = {}
            for token_id, logprob in (*found.top, (found.token_id, found.logprob)):
                top.setdefault(_text(known[token_id]), logprob)  # of tokens that read alike, the likeliest
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _advance(self, token: bytes) -> int:
        """Where the token begins, counted in characters; the next one begins after it."""
        offset = self._offset
        self._offset += len(self._characters.decode(token))
        return offset


async def _bytes_of(
    client: EngineClient, scored: Sequence[TokenLogprobs], others: Sequence[int] = ()
) -> dict[int, bytes]:
    """The bytes of every token that is named."""
    named = {*others, *(found.token_id for found in scored), *(token for found in scored for token, _ in found.top)}
    token_ids = list(named)
    return dict(zip(token_ids, await client.token_bytes(token_ids), strict=True))


def _entry(known: dict[int, bytes], token_id: int, logprob: float) -> dict[str, Any]:
    token = known[token_id]
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
