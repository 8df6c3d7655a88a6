"""Fields of the OpenAI protocol that this version does not serve: refused unless their value asks for nothing.

A field that is accepted and then ignored would give a wrong answer without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.errors import UnsupportedValueError
from appliance.server.body import quoted

_NO_SEARCH = "this version samples each answer by itself; leave it out"
_NO_PROMPT_LOGPROBS = "log probabilities of a prompt come from /v1/completions with echo and logprobs"
_NO_CONSTRAINT = "this version does not constrain the form of answers; describe the form in the prompt"
_NO_TOOLS = "this version calls no tools; leave it out or set tool_choice to 'none'"
_NO_SAMPLER = "this version has no such sampler; use temperature, top_p, top_k or min_p"
_NO_TEMPLATE = "only the model's own chat template is used; leave it out"
_TEXT_ONLY = "the model answers in text only; leave it out"

_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), _NO_SEARCH),
    "prompt_logprobs": ((False,), _NO_PROMPT_LOGPROBS),
    "suffix": (("",), "this version does not fill in the middle; leave it out"),
    "response_format": (({"type": "text"},), _NO_CONSTRAINT),
    "structured_outputs": (({},), _NO_CONSTRAINT),
    "guided_json": ((), _NO_CONSTRAINT),
    "guided_regex": ((), _NO_CONSTRAINT),
    "guided_choice": ((), _NO_CONSTRAINT),
    "guided_grammar": ((), _NO_CONSTRAINT),
    "json_schema": (({},), _NO_CONSTRAINT),
    "grammar": (("",), _NO_CONSTRAINT),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "web_search_options": ((), _NO_TOOLS),
    "chat_template": ((), _NO_TEMPLATE),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "typical_p": ((1,), _NO_SAMPLER),
    "typical": ((1,), _NO_SAMPLER),
    "tfs": ((1,), _NO_SAMPLER),
    "top_a": ((0,), _NO_SAMPLER),
    "mirostat": ((0,), _NO_SAMPLER),
    "mirostat_mode": ((0,), _NO_SAMPLER),
    "dry_multiplier": ((0,), _NO_SAMPLER),
    "xtc_probability": ((0,), _NO_SAMPLER),
}
"""Field: the values that ask for nothing, and what to tell about all others."""

_CHAT_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), "only /v1/completions repeats its prompt; leave it out"),
}
"""Those that only completions serve."""

_TOOL_LISTS = (("tools", "tool_choice"), ("functions", "function_call"))


def refuse_unsupported(content: Mapping[str, Any], *, is_chat: bool) -> None:
    """Raises UnsupportedValueError for the first field of a request, free of null fields, that is not served."""
    fields = {**_FIELDS, **_CHAT_FIELDS} if is_chat else _FIELDS
    for name, (neutral, sentence) in fields.items():
        if name in content and not any(_same(content[name], value) for value in neutral):
            raise UnsupportedValueError(f"{name} {quoted(content[name])} is not supported: {sentence}.", param=name)
    for name, choice in _TOOL_LISTS:
        if content.get(name, []) != [] and content.get(choice) != "none":
            raise UnsupportedValueError(f"{name} is not supported: {_NO_TOOLS}.", param=name)


def _same(found: object, neutral: object) -> bool:
    """Equality in which true is not 1."""
    return found == neutral and isinstance(found, bool) == isinstance(neutral, bool)
