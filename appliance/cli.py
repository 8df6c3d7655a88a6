"""The command line. Flags derive from `Settings`; nothing heavy is imported before a command needs it."""

from __future__ import annotations

import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from appliance import __version__
from appliance.bench.command import app as bench_app
from appliance.errors import ApplianceError
from appliance.inspect_command import inspect_command
from appliance.settings import Settings, flag_of

_NOT_FLAGS = ("model", "api_key")  # an argument; a secret, which a command line would show to other users

app = typer.Typer(
    help="Serves 4-bit language models to a browser chat and an OpenAI-compatible API.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.command("inspect")(inspect_command)


def _plain_type(annotation: Any) -> Any:
    """The type a value is written as: without None and without constraints."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
        return _plain_type(annotation)
    return annotation


def _spelled(default: object) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def _metavar(plain: Any) -> str:
    if typing.get_origin(plain) is Literal:
        return "|".join(map(str, typing.get_args(plain)))
    if typing.get_origin(plain) is tuple:
        return "NAME,..."
    return {int: "NUMBER", ByteSize: "SIZE"}.get(plain, "TEXT")


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The option of one setting. Values stay text here: `Settings` alone checks them, wherever they come from."""
    plain = _plain_type(field.annotation)
    default = "" if field.default in (None, ()) else f" Default: {_spelled(field.default)}."
    help_text = (field.description or "") + default
    if plain is bool:
        option = typer.Option(f"{flag_of(name)}/--no-{flag_of(name)[2:]}", help=help_text, show_default=False)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool | None, option]
        )
    option = typer.Option(flag_of(name), help=help_text, metavar=_metavar(plain), show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command of the form `f(model, **flags)` one option for each setting."""
    model = typer.Argument(metavar="MODEL", help=Settings.model_fields["model"].description, show_default=False)
    parameters = [
        inspect.Parameter(
            "model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[str | None, model]
        ),
        *(_parameter(name, field) for name, field in Settings.model_fields.items() if name not in _NOT_FLAGS),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@app.callback(invoke_without_command=True)
def _appliance(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"appliance {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("serve")
@_with_setting_flags
def _serve(**values: Any) -> None:
    """Serve MODEL, or the built-in model, until Ctrl-C.

    Every flag can also be set as an APPLIANCE_* environment variable or in appliance.toml, e.g. APPLIANCE_PORT or port.
    API keys can be set there only: APPLIANCE_API_KEY or api_key.
    """
    settings = Settings.load({name: value for name, value in values.items() if value is not None})
    from appliance.serve import serve

    raise typer.Exit(serve(settings))


@app.command("quantize")
def _quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of an unquantised model, 16- or 32-bit.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="awq|gptq|rtn", help="autoawq; auto-gptq, which needs an NVIDIA card; or rounding to nearest."
        ),
    ] = "awq",
    bits: Annotated[int, typer.Option(help="awq: 4; gptq: 2, 3, 4, 8; rtn: 4, 8.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Inputs that share a scale: 16, 32, 64, 128, and -1 (all) but for awq.")
    ] = 128,
    calibration: Annotated[
        Path | None, typer.Option(help="Text file to calibrate on, a fifth of it to measure on. Default: a small one.")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            envvar="APPLIANCE_QUANTIZE_PYTHON",
            help="Python that has auto-gptq and autoawq. Default: an environment made in the cache.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model folder at --out.")] = False,
    perplexity: Annotated[bool, typer.Option(help="Measure perplexity before and after.")] = True,
) -> None:
    """Quantise MODEL into a new folder, read it back, and compare the two.

    The first use of awq or gptq installs the packages into an environment of their own (about 3 GB).
    """
    from appliance.quantize.run import Request, quantize
    from appliance.quantize.scheme import Scheme
    from appliance.startup_display import StartupDisplay

    request = Request(model, out, Scheme(method, bits, group_size), calibration, python, force, perplexity)
    with StartupDisplay() as display:
        outcome = quantize(request, display.show)
    print("\n".join(outcome.lines()))


def _wants_traceback(arguments: list[str]) -> bool:
    """Known before the settings are: they may be what is wrong."""
    return "--log-level=debug" in "=".join(arguments) or os.environ.get("APPLIANCE_LOG_LEVEL") == "debug"


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and end the process: with 0, or with an error's exit code after its sentence on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments, prog_name="appliance", standalone_mode=False)
    except (ApplianceError, typer.TyperException) as error:
        if _wants_traceback(arguments):
            raise
        message = error.message if isinstance(error, ApplianceError) else error.format_message()
        print(f"error: {message}", file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code or 0)
