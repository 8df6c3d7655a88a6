"""What a model folder says about text: its tokenizer, its chat template, the sampling its makers suggest.

Knows nothing of engines; reading it needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.chat_template import ChatTemplate
from appliance.client import ModelInfo
from appliance.errors import InvalidRequestError
from appliance.generation_config import default_sampling
from appliance.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """Immutable; may be used from several threads."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    default_sampling: dict[str, float]

    @classmethod
    def load(cls, folder: str) -> ModelText:
        """Raises CheckpointError if there is no tokenizer that can be used, or a broken template."""
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, ChatTemplate.load(folder, tokenizer.special_tokens), default_sampling(folder))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> str:
        """The prompt for the next answer, its special tokens included: tokenize it with `encode_rendered`.

        Raises InvalidRequestError (param "messages") if the template refuses or there is none.
        """
        if self.chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template: send a prompt instead of messages (over HTTP to /v1/completions), or "
                "put the template that belongs to the model into its folder as chat_template.jinja.",
                param="messages",
            )
        return self.chat_template.render(messages, template_kwargs)

    def describe(self, info: ModelInfo) -> ModelInfo:
        """The engine's facts about the model, with those about its text."""
        return dataclasses.replace(
            info, has_chat_template=self.chat_template is not None, default_sampling=self.default_sampling
        )
