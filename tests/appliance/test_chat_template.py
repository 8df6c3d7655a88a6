"""Chat templates: transformers' dialect, other message orders than the author thought of, and bounds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from appliance import template_environment
from appliance.chat_template import ChatTemplate
from appliance.errors import CheckpointError, InvalidRequestError
from appliance.tokenizer import Tokenizer
from tests.appliance import tokenizer_files

USER: dict[str, Any] = {"role": "user", "content": "hello"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "hi"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "be brief"}

LLAMA2 = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
DIALECT = """\
{%- set state = namespace({'other': 1}, count=0) %}
{% for message in messages %}
    {% if message.skip is defined %}
        {% continue %}
    {% endif %}
    {% set state.count = state.count + state.other %}
    {% generation %}
    {{- state.count }}:{{ message.content | trim }}
    {% endgeneration %}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
{% endfor %}
{% if tools is not none %}
{{ tools | tojson }}
{{ tools | tojson(indent=2) }}
{% endif %}
{{ strftime_now('%Y')[:2] }}{{ range(3) | list }}{{ missing }}
"""


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens)


def llama2() -> ChatTemplate:
    return template(LLAMA2, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("source", [tokenizer_files.CHATML, DIALECT], ids=["chatml", "dialect"])
@pytest.mark.parametrize("tools", [None, [{"name": "süß", "<b>": 1}]], ids=["no-tools", "tools"])
def test_rendering_equals_that_of_transformers(source: str, tools: list[Any] | None) -> None:
    messages = [SYSTEM, USER, {**USER, "skip": True}, ASSISTANT, {"role": "user", "content": "  <世>  "}, USER]
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer_files.byte_level_bpe())  # type: ignore[no-untyped-call]
    expected = oracle.apply_chat_template(
        messages, chat_template=source, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert template(source).render(messages, {"tools": tools}) == expected


def test_template_variables_reach_the_template() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}{{ add_generation_prompt }}"
    variables = {"enable_thinking": False, "messages": [], "add_generation_prompt": False}
    assert template(source).render([USER], variables) == "False1True"


def test_a_rendered_chat_has_exactly_one_bos(tmp_path: Path) -> None:
    """The template writes <s> and the tokenizer would put another one in front of raw text."""
    tokenizer_files.save_llama2(tmp_path, chat_template=LLAMA2)
    tokenizer = Tokenizer.load(tmp_path)
    loaded = ChatTemplate.load(tmp_path, tokenizer.special_tokens)
    assert loaded is not None
    ids = tokenizer.encode_rendered(loaded.render([USER], {}))
    assert ids.count(1) == 1
    assert ids[0] == 1


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER, USER], "<s>[INST] hello\n\nhello [/INST]"),
        ([SYSTEM, USER], "<s>[INST] be brief\n\nhello [/INST]"),
        ([SYSTEM], "<s>[INST] be brief [/INST]"),
        ([USER, ASSISTANT, ASSISTANT, USER], "<s>[INST] hello [/INST] hi\n\nhi </s><s>[INST] hello [/INST]"),
        ([USER, SYSTEM, USER], "<s>[INST] be brief\n\nhello\n\nhello [/INST]"),
        ([SYSTEM, USER, ASSISTANT, SYSTEM, USER], "<s>[INST] be brief\n\nbe brief\n\nhello [/INST] hi </s>"
         "<s>[INST] hello [/INST]"),
    ],
)  # fmt: skip
def test_orders_that_the_template_refuses_are_rearranged(messages: list[dict[str, Any]], expected: str) -> None:
    assert llama2().render(messages, {}) == expected


def test_system_text_goes_first_if_the_template_only_wants_that() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% endfor %}"
    )
    rendered = template(source).render([USER, SYSTEM, USER, ASSISTANT], {})
    assert rendered == "[system]be brief[user]hello\n\nhello[assistant]hi"


def test_messages_the_template_takes_are_not_rearranged() -> None:
    rendered = template(tokenizer_files.CHATML).render([USER, SYSTEM, USER, USER], {})
    assert rendered.count("<|im_start|>user") == 3
    assert rendered.index("be brief") > rendered.index("hello")


def test_messages_with_tool_calls_are_not_merged() -> None:
    source = "{% if messages | length == 3 %}{{ raise_exception('no') }}{% endif %}{{ messages | length }}"
    call = {**ASSISTANT, "tool_calls": [{}]}
    with pytest.raises(InvalidRequestError, match="no"):
        template(source).render([USER, call, ASSISTANT], {})
    assert template(source).render([USER, ASSISTANT, ASSISTANT], {}) == "2"


def test_a_refusal_carries_the_templates_own_text() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        llama2().render([ASSISTANT, USER], {})
    assert caught.value.param == "messages"
    assert caught.value.status == 400


def test_a_template_that_breaks_is_a_refusal_too() -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        template("{{ messages[0].content + 1 }}").render([USER], {})
    with pytest.raises(InvalidRequestError, match="undefined"):
        template("{{ nothing.at.all }}").render([USER], {})


def test_the_last_message_can_be_continued() -> None:
    """Cut behind the last message's own text, though the same text came before and the template would add to it."""
    messages = [USER, {"role": "assistant", "content": "The answer "}, USER]
    messages.append({"role": "assistant", "content": "The answer "})
    prompt = template(tokenizer_files.CHATML).render(messages, {"continue_final_message": True})
    assert prompt.endswith("<|im_start|>assistant\nThe answer ")
    assert prompt.count("The answer ") == 2
    assert "<|im_end|>" in prompt


def test_continuing_what_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="leaves out"):
        template("{{ messages[0].content }}").render([USER, ASSISTANT], {"continue_final_message": True})
    with pytest.raises(InvalidRequestError, match="needs a last message with text"):
        template("x").render([{"role": "assistant", "content": None}], {"continue_final_message": True})


def test_the_jinja_file_wins_over_the_configuration(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, {}) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from configuration"}))
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None
    assert loaded.render([USER], {}) == "from configuration"
    (tmp_path / "chat_template.jinja").write_text("from file")
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None
    assert loaded.render([USER], {}) == "from file"


def test_named_templates_are_chosen_by_the_request(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None
    assert loaded.render([USER], {}) == "plain"
    assert loaded.render([USER], {"tools": [{"name": "f"}]}) == "tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None
    assert loaded.render([USER], {"tools": [{"name": "f"}]}) == "tools from a file"


def test_a_template_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTemplate.load(tmp_path, {})


@pytest.mark.parametrize("declared", ["{% if %}", [{"name": "rag", "template": "x"}], [{"name": "default"}], [1], 7])
def test_a_template_that_cannot_be_used_is_refused_at_load(tmp_path: Path, declared: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}))
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate.load(tmp_path, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__html__ = messages %}",
        "{{ namespace(__html__=1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        template(source).render([USER], {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(10**4) %}{% for j in range(10**4) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ 10 ** 1000000000 }}",
        "{% set ns = namespace(n=3) %}{% for i in range(100) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set s = 'a' * 10**6 %}{% for i in range(100) %}{{ s }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(45) }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ lipsum(n=10000000) }}",
    ],
)
def test_endless_templates_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_environment, "MAX_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(InvalidRequestError):
        template(source).render([USER], {})
    assert time.monotonic() - started < 5


def test_a_slow_template_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_environment, "MAX_SECONDS", 0.05)
    source = "{% for a in 'x' * 1000 %}{% for b in 'x' * 1000 %}{{ a }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=r"0\.05 seconds"):
        template(source).render([USER], {})
