"""Renders messages to a prompt with the Jinja template of a model folder.

Knows where templates are kept, which one a request gets, and what to do with messages in an order that a template
refuses; no tokens. Special tokens that a user writes into a message are not told apart from the template's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from appliance.errors import CheckpointError, InvalidRequestError
from appliance.template_environment import TemplateEnvironment, render
from appliance.tokenizer import read_json

_SEPARATOR = "\n\n"
_PLAIN_KEYS = {"role", "content"}

Message = Mapping[str, Any]


class ChatTemplate:
    """The templates of one model. May be used from several threads."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """sources maps names to templates; "default" and, for requests with tools, "tool_use" are used.

        Raises CheckpointError if one is no valid template.
        """
        environment = TemplateEnvironment()
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise CheckpointError(
                    f"the chat template {name!r} is no valid Jinja template ({error}): mend it, or remove it from the "
                    "model's folder to serve completions only"
                ) from error
        if "default" not in sources:
            raise CheckpointError(f"no chat template is named default, only {', '.join(sources)}: rename one")
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Read a model folder's templates; None if it has none.

        chat_template.jinja is the default one, tokenizer_config.json's counts where there is no such file;
        additional_chat_templates/NAME.jinja are the named ones. Raises CheckpointError.
        """
        sources = _declared_sources(folder)
        files = {"default": Path(folder) / "chat_template.jinja"}
        files |= {path.stem: path for path in (Path(folder) / "additional_chat_templates").glob("*.jinja")}
        try:
            sources |= {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"a chat template of {folder} cannot be read ({error}): fetch it again") from error
        return cls(sources, special_tokens) if sources else None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The prompt for the next answer.

        `variables` are the template's own, such as tools or enable_thinking. With `continue_final_message` true the
        prompt ends inside the last message instead of opening a new one.

        Many templates refuse message orders that clients send. If this one raises, the messages are rearranged: all
        system text first and neighbours of one role merged, then the system text moved into the first user message.
        Raises InvalidRequestError with the text of the template's first refusal if it refuses all of these.
        """
        refusal: Exception | None = None
        for arrangement in _arrangements(messages):
            try:
                return self._render(arrangement, variables)
            except InvalidRequestError:
                raise
            except Exception as error:  # raised by the model author's program: an answer about these messages
                refusal = refusal or error
        raise InvalidRequestError(f"The model's chat template refuses these messages: {refusal}", param="messages")

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        if not variables.get("continue_final_message"):
            return self._run(messages, variables, add_generation_prompt=True)
        if not messages or not isinstance(messages[-1].get("content"), str):
            raise InvalidRequestError("continue_final_message needs a last message with text", param="messages")
        mark = uuid.uuid4().hex  # the message's text may occur earlier too; this cannot
        marked = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        prompt, found, _ = self._run(marked, variables, add_generation_prompt=False).rpartition(mark)
        if not found:
            raise InvalidRequestError(
                "The model's chat template leaves out the last message, so it cannot be continued", param="messages"
            )
        return prompt

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        template = self._templates["tool_use" if context["tools"] and "tool_use" in self._templates else "default"]
        return render(template, context)


def _declared_sources(folder: str | Path) -> dict[str, str]:
    """tokenizer_config.json's chat_template: nothing, a text, or a list of {"name", "template"}."""
    match read_json(folder, "tokenizer_config.json").get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*entries] if all(isinstance(entry, dict) for entry in entries):
            sources = {entry.get("name"): entry.get("template") for entry in entries}
            if all(isinstance(text, str) for pair in sources.items() for text in pair):
                return sources
    raise CheckpointError(
        f"the chat template in {folder}/tokenizer_config.json is neither a text nor a list of named texts: mend it, or "
        "put the template into chat_template.jinja"
    )


def _arrangements(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    yield messages
    system, others = _split_system(messages)
    yield _merge_neighbours([*system, *others])
    if system:
        fold = {"role": "user", "content": system[0]["content"]}
        first_user = next((i for i, message in enumerate(others) if message.get("role") == "user"), 0)
        yield _merge_neighbours([*others[:first_user], fold, *others[first_user:]])


def _split_system(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """All system text as one message, if there is any, and the other messages."""
    texts = [str(message.get("content") or "") for message in messages if message.get("role") == "system"]
    system: list[Message] = [{"role": "system", "content": _SEPARATOR.join(texts)}] if texts else []
    return system, [message for message in messages if message.get("role") != "system"]


def _merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Join plain messages of one role that follow each other; those with tool calls and the like stay apart."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.get("role") == message.get("role")
            and last.keys() == message.keys() == _PLAIN_KEYS
            and isinstance(last["content"], str)
            and isinstance(message["content"], str)
        ):
            merged[-1] = {**last, "content": last["content"] + _SEPARATOR + message["content"]}
        else:
            merged.append(message)
    return merged
