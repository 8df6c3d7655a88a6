"""`appliance bench`: the command line of the load generator."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure a server.", no_args_is_help=True)


@app.command("serve")
def _serve(
    base_url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask. Default: the first the server lists.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="Closed loop: requests in flight. Default: 8.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, at random times.")] = None,
    num_requests: Annotated[
        int | None, typer.Option("--num-requests", "-n", help="Requests to send. Default: 64.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to send requests for, instead of a number.")] = None,
    prompt_words: Annotated[
        str, typer.Option(help="Words of a prompt, about a token each: a number or a range.", metavar="LENGTH")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(help="Tokens of an answer: a number or a range.", metavar="LENGTH")
    ] = "64",
    seed: Annotated[int, typer.Option(help="Decides prompts and times. A new one for every run.")] = 0,
    stream: Annotated[bool, typer.Option(help="Ask for a stream; only then is the time of a token known.")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exactly the given length.")] = True,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    api: Annotated[str, typer.Option(help="Endpoint to ask.", metavar="chat|completions")] = "chat",
    warmup: Annotated[int, typer.Option(help="Requests beforehand that do not count.", min=0)] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 600.0,
    save: Annotated[Path | None, typer.Option(help="File for all answers, to compare with another run's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON in the last line.")] = False,
) -> None:
    """Put load on an OpenAI-compatible server and say how fast it answers.

    An API key is taken from the environment variable OPENAI_API_KEY. Ends with 1 if no request was answered.
    """
    import uvloop
    from rich.console import Console

    from appliance.bench.http import Endpoint
    from appliance.bench.load import LoadSpec, Run, first_model, run_load
    from appliance.bench.prompts import Range
    from appliance.bench.report import Report, save_answers

    endpoint = Endpoint.parse(base_url, os.environ.get("OPENAI_API_KEY", ""))
    lengths = Range.parse(prompt_words, "--prompt-words"), Range.parse(output_tokens, "--output-tokens")

    async def measure() -> tuple[LoadSpec, Run]:
        spec = LoadSpec(
            model=model or await first_model(endpoint),
            seed=seed,
            concurrency=8 if concurrency is None and rate is None else concurrency,
            rate=rate,
            num_requests=64 if num_requests is None and duration is None else num_requests,
            duration_s=duration,
            warmup=warmup,
            prompt_words=lengths[0],
            output_tokens=lengths[1],
            stream=stream,
            ignore_eos=ignore_eos,
            temperature=temperature,
            api=api,
            timeout_s=timeout,
        )
        return spec, await run_load(endpoint, spec)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        spec, run = runner.run(measure())
    report = Report.of(run)
    if save is not None:
        save_answers(save, spec, run.answers)
    console = Console(highlight=False)
    console.print(report.table())
    print("\n".join(report.lines()))
    if as_json:
        print(json.dumps(report.document(spec)))
    raise typer.Exit(0 if report.num_ok else 1)


@app.command("compare")
def _compare(
    first: Annotated[Path, typer.Argument(help="A file that `bench serve --save` wrote.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same seed and lengths.")],
) -> None:
    """Say whether two runs gave equal answers to the prompts they share. Ends with 1 if not."""
    from appliance.bench.report import differing_answers

    num_shared, differing = differing_answers(first, second)
    print(f"{num_shared - len(differing)} of {num_shared} answers are equal.")
    if differing:
        print(f"Different: {', '.join(map(str, differing))}")
    raise typer.Exit(1 if differing else 0)
