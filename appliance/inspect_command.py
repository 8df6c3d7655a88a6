"""`appliance inspect`: what is known of a model, as tables for people or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from appliance.errors import SelfTestError
from appliance.model_details import LayerPlan, ModelDetails, Verdict
from appliance.settings import Settings
from appliance.startup_display import StartupDisplay, size_text

_MODEL_HELP = "Folder of a checkpoint, a .gguf file, or an id of the hub (owner/name); none: the built-in model."


def inspect_command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Read and test the weights. Default: on.")
    ] = True,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Where it would run.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of activations and KV cache.")] = None,
) -> None:
    """Say what MODEL holds, which kernels would run it, whether its weights are sound, and what memory it takes.

    Loads nothing as a whole, and of a model on the hub reads the headers only. Settings count as they do for serve.
    Ends with 3 where the self-test fails.
    """
    given = {"model": model, "device": device, "dtype": dtype}
    settings = Settings.load({name: value for name, value in given.items() if value is not None})
    from appliance.inspection import inspect_model

    with StartupDisplay() as display:
        config = settings.engine_config(Path(settings.model or ""))
        details = inspect_model(settings.model, config, display.show, self_test)
    if as_json:
        print(json.dumps(dataclasses.asdict(details), indent=1))
    else:
        console = Console()
        for part in _parts(details):
            console.print(part)
    if details.self_test.verdict is Verdict.FAILED:
        raise typer.Exit(SelfTestError.exit_code)


def _parts(details: ModelDetails) -> Iterator[Any]:
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(details):
        facts.add_row(Text(name, style="bold"), Text(text))
    yield facts
    yield _layer_table(details)
    for (kernel, reason), layers in _refusals(details).items():
        where = "all layers" if len(layers) == len(details.layers) else ", ".join(layers)
        yield Text(f"Not {kernel} for {where}: it {reason}.")


def _facts(details: ModelDetails) -> Iterator[tuple[str, str]]:
    memory = details.memory
    yield "model", details.model
    yield "architecture", details.architecture
    yield (
        "shape",
        f"{details.num_parameters / 1e6:,.0f} million parameters, {details.num_layers} layers of "
        f"{details.hidden_size}, {details.num_heads} heads ({details.num_kv_heads} of keys and values) of "
        f"{details.head_dim}, {details.vocab_size:,} tokens",
    )
    yield "context", f"{details.max_position:,} tokens"
    template = {True: "yes", False: "none: it completes text only", None: "not looked for"}
    yield "chat template", template[details.has_chat_template]
    yield "format", f"{details.description}; {size_text(details.file_bytes)} on disk"
    yield "zero points", details.zero_points
    yield "act-order", "yes" if details.act_order else "no"
    yield from (("exception", line) for line in details.exceptions)
    yield from (("evidence", line) for line in details.evidence)
    yield from (("warning", line) for line in details.warnings)
    yield "self-test", f"{details.self_test.verdict}: {details.self_test.summary}"
    yield from (("fault", line) for line in details.self_test.faults)
    yield "device", f"{details.dtype} on {details.device}"
    yield (
        "memory",
        f"weights {size_text(memory.weights)}, the largest step {size_text(memory.step)}, "
        f"KV cache {memory.kv_bytes_per_token:,} bytes a token; "
        f"{size_text(memory.available)} of {size_text(memory.total)} are free",
    )
    if memory.max_model_len:
        tokens = memory.kv_cache // memory.kv_bytes_per_token
        state = f" beside {size_text(memory.recurrent_state)} of recurrent state" if memory.recurrent_state else ""
        yield (
            "fits",
            f"a KV cache of {size_text(memory.kv_cache)}, {tokens:,} tokens{state}; "
            f"contexts of {memory.max_model_len:,}",
        )
    else:
        yield "fits", "no: there is no room for the KV cache beside the weights"


def _layer_table(details: ModelDetails) -> Table:
    table = Table(box=SIMPLE)
    for heading in ("layers", "K x N, stored, packed", "kernels (decode, prefill)", "error, bound"):
        table.add_column(heading, overflow="fold")
    for layer in details.layers:
        table.add_row(
            "\n".join(map(_short, layer.layers)) + (f" ({layer.count})" if layer.count > 1 else ""),
            f"{layer.K} x {layer.N}, {storage_text(layer)}, {size_text(layer.nbytes)}",
            ", ".join(dict.fromkeys((layer.decode, layer.prefill))),
            _error_text(details, layer),
        )
    return table


def _refusals(details: ModelDetails) -> dict[tuple[str, str], list[str]]:
    """Kernel and reason -> the layers it was refused for."""
    refusals: dict[tuple[str, str], list[str]] = {}
    for layer in details.layers:
        for refused in layer.refused:
            refusals.setdefault((refused.kernel, refused.reason), []).append(_short(layer.layers[0]))
    return refusals


def _short(name: str) -> str:
    return name.removeprefix("model.layers.")


def storage_text(layer: LayerPlan) -> str:
    """`4-bit group 128 act-order`, `16-bit`."""
    parts = [f"{layer.bits}-bit"]
    if layer.group_size:
        parts.append(f"group {layer.group_size}" if layer.group_size < layer.K else "one group")
    if layer.act_order:
        parts.append("act-order")
    return " ".join(parts)


def _error_text(details: ModelDetails, layer: LayerPlan) -> str:
    """The largest error of the kernels that run it, with its bound."""
    kernels = (layer.decode, layer.prefill)
    tests = [test for test in details.self_test.kernels if test.spec == layer.spec and test.kernel in kernels]
    errors = [test.error for test in tests if test.error is not None]
    return f"{max(errors):.4f}, {tests[0].bound:.4f}" if errors else "not run"
