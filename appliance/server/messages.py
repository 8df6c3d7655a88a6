"""Chat messages as clients send them -> the plain form that templates take: a role and a string.

Text parts are concatenated without a separator, as OpenAI does. It knows the protocol, not the model's template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.client import ModelInfo
from appliance.errors import InvalidRequestError, UnsupportedValueError
from appliance.server.body import quoted

MAX_MESSAGES = 10_000

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part: its key that holds the text."""

_STRING_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Fields passed on to the template as they are; null and unknown ones are dropped."""


def normalise_messages(messages: Sequence[Any], model: ModelInfo) -> list[dict[str, Any]]:
    """Messages with role system, user, assistant or tool and content a string; missing content is "".

    Raises InvalidRequestError and, for parts that are no text, UnsupportedValueError naming the model.
    """
    if not messages:
        raise InvalidRequestError("messages is empty: send at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages must hold at most {MAX_MESSAGES} messages, found {len(messages)}.", param="messages"
        )
    return [_message(message, f"messages[{index}]", model) for index, message in enumerate(messages)]


def _message(message: Any, path: str, model: ModelInfo) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{path} must be an object, found {quoted(message)}.", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}, found {quoted(role)}.", param=f"{path}.role"
        )
    plain: dict[str, Any] = {"role": _ROLES[role], "content": _text(message.get("content"), f"{path}.content", model)}
    for name in _STRING_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequestError(f"{path}.{name} must be a string, found {quoted(value)}.", param=f"{path}.{name}")
        plain[name] = value
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    return plain


def _text(content: Any, path: str, model: ModelInfo) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{path} must be a string or a list of text parts, found {quoted(content)}.", param=path
        )
    return "".join(_part_text(part, f"{path}[{index}]", model) for index, part in enumerate(content))


def _part_text(part: Any, path: str, model: ModelInfo) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequestError(f"{path} must be a part with a type, found {quoted(part)}.", param=path)
    key = _TEXT_PARTS.get(kind)
    if key is None:
        served = f"the model {model.id} reads text only"
        if model.is_text_part:
            served = f"of the model {model.id} only the text part is served"
        raise UnsupportedValueError(
            f"{path} is of type {quoted(kind)}, but {served}: send parts of type text.", param=path
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.{key} must be a string, found {quoted(text)}.", param=f"{path}.{key}")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Calls of earlier turns. Arguments travel as JSON text; most templates want the object (Qwen, Llama)."""
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{path} must be a list, found {quoted(calls)}.", param=path)
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"{path}[{index}] must hold a function with a name, found {quoted(call)}.", param=f"{path}[{index}]"
            )
        plain.append(call | {"function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return plain


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
