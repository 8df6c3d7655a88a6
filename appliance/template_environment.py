"""The Jinja that chat templates are written in, and the bounds they run within.

The dialect is transformers' (chat_template_utils.py): block trimming, loop controls, the generation tag, tojson,
raise_exception, strftime_now. A template is a program by a stranger: it runs in Jinja's immutable sandbox, without
access to Python's internals, and within bounds on output, on strings made by * and +, on loops over range(), and on
time, which is looked at whenever it writes, calls or starts such a loop. Filters and `~` are not bounded: a template
made to do harm can still fill the memory. Knows no messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from appliance.errors import InvalidRequestError

MAX_CHARACTERS = 1 << 24
MAX_ITERATIONS = 1 << 20
"""Of all the range() loops of one rendering together."""
MAX_SECONDS = 10.0
_CHECK_INTERVAL = 1024
_MAX_BITS = 1024


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Run a template of a `TemplateEnvironment`.

    Raises InvalidRequestError if it exceeds a bound, and whatever else the template raises.
    """
    bounds = _Bounds()
    token = _bounds.set(bounds)
    try:
        return "".join(bounds.limit_output(template.generate(variables)))
    finally:
        _bounds.reset(token)


class _Bounds:
    """What one rendering has used up."""

    def __init__(self) -> None:
        self._deadline_s = time.monotonic() + MAX_SECONDS
        self._iterations = 0
        self._characters = 0

    def limit_range(self, *arguments: int) -> range:
        numbers = range(*arguments)
        self._iterations += len(numbers)
        if self._iterations > MAX_ITERATIONS:
            raise _out_of_bounds(f"{MAX_ITERATIONS} iterations")
        self.check_time()
        return numbers

    def limit_output(self, pieces: Iterator[str]) -> Iterator[str]:
        for index, piece in enumerate(pieces):
            self._characters += len(piece)
            if self._characters > MAX_CHARACTERS:
                raise _out_of_bounds(f"{MAX_CHARACTERS} characters")
            if index % _CHECK_INTERVAL == 0:
                self.check_time()
            yield piece

    def check_time(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise _out_of_bounds(f"{MAX_SECONDS:g} seconds")


def _out_of_bounds(limit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The model's chat template does not end within {limit} for these messages: send fewer or shorter ones, or "
        "use /v1/completions.",
        param="messages",
    )


_bounds: ContextVar[_Bounds] = ContextVar("bounds")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates. One serves any number of threads."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationExtension]
        )
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]  # text without end, and of no use here
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals["namespace"] = _Namespace
        self.globals["range"] = lambda *arguments: _bounds.get().limit_range(*arguments)

    def call(self, context: jinja2.runtime.Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        _bounds.get().check_time()  # a macro that calls itself twice, deep enough, never writes
        return super().call(context, target, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            num_bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if num_bits > _MAX_BITS:
                raise _out_of_bounds(f"numbers of {_MAX_BITS} bits")
        for sequence, count in ((left, right), (right, left)):
            is_repetition = isinstance(sequence, str | list | tuple) and isinstance(count, int)
            if is_repetition and len(sequence) * count > MAX_CHARACTERS:
                raise _out_of_bounds(f"{MAX_CHARACTERS} characters")
        is_joined = operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple)
        if is_joined and len(left) + len(right) > MAX_CHARACTERS:
            raise _out_of_bounds(f"{MAX_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """Cannot be given the underscored names that Python and Jinja look for in objects."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _GenerationExtension(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is only what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> NoReturn:
    raise jinja2.TemplateError(text)
