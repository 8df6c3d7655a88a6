"""From recorded answers to numbers: rates, percentiles, a table for people and a document for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from rich.box import SIMPLE
from rich.table import Table

from appliance.bench.load import Answer, LoadSpec, Run
from appliance.bench.prompts import prompt_and_length
from appliance.errors import UsageError

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles (linear between neighbours) and maximum of some durations in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where there is nothing to describe."""
        if not values:
            return None
        p50, p90, p95, p99 = map(float, numpy.percentile(values, PERCENTILES))
        return cls(len(values), float(numpy.mean(values)), p50, p90, p95, p99, max(values))


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run. Only whole answers count, but for `errors`.

    ttft: from due to the first text. tpot: from the first text to the last, over the tokens after the first; one value
    a request. itl: from one piece of text to the next; one value a pair, and a piece may hold several tokens. e2e: from
    due to the end. The first three are None without streaming.
    """

    num_ok: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None

    @classmethod
    def of(cls, run: Run) -> Report:
        good = [answer for answer in run.answers if not answer.error]
        streamed = [answer for answer in good if answer.arrivals]
        input_tokens = sum(answer.prompt_tokens for answer in good)
        output_tokens = sum(answer.output_tokens for answer in good)
        seconds = run.duration_s or 1.0  # nothing was sent, all rates are 0
        return cls(
            num_ok=len(good),
            errors=dict(sorted(Counter(answer.error for answer in run.answers if answer.error).items())),
            duration_s=run.duration_s,
            requests_per_s=len(good) / seconds,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            input_tokens_per_s=input_tokens / seconds,
            output_tokens_per_s=output_tokens / seconds,
            ttft=Spread.of([answer.arrivals[0] - answer.due for answer in streamed]),
            tpot=Spread.of(
                [
                    (answer.arrivals[-1] - answer.arrivals[0]) / (answer.output_tokens - 1)
                    for answer in streamed
                    if answer.output_tokens > 1
                ]
            ),
            itl=Spread.of(
                [
                    later - earlier
                    for answer in streamed
                    for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
                ]
            ),
            e2e=Spread.of([answer.ended - answer.due for answer in good]),
        )

    def document(self, spec: LoadSpec) -> dict[str, Any]:
        """Everything as JSON values, with the load that gave it. Times are seconds."""
        load = asdict(spec) | {"prompt_words": str(spec.prompt_words), "output_tokens": str(spec.output_tokens)}
        return {"load": load, "results": asdict(self)}

    def table(self) -> Table:
        table = Table(title=f"{self.num_ok} answers in {self.duration_s:.2f} s", title_justify="left", box=SIMPLE)
        table.add_column("milliseconds")
        columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
        for column in columns:
            table.add_column(column, justify="right")
        for name, spread in (
            ("first token", self.ttft),
            ("per output token", self.tpot),
            ("between tokens", self.itl),
            ("end to end", self.e2e),
        ):
            if spread is not None:
                table.add_row(name, *(f"{1000 * getattr(spread, column):.1f}" for column in columns))
        return table

    def lines(self) -> list[str]:
        """What is not in the table."""
        errors = ", ".join(f"{count} x {error}" for error, count in self.errors.items())
        return [
            f"requests  {self.requests_per_s:.3f} a second",
            f"input     {self.input_tokens_per_s:.1f} tokens/s ({self.input_tokens} tokens)",
            f"output    {self.output_tokens_per_s:.1f} tokens/s ({self.output_tokens} tokens)",
            f"errors    {errors or 'none'}",
        ]


def save_answers(file: Path, spec: LoadSpec, answers: Iterable[Answer]) -> None:
    """One JSON object a line and answer, with its prompt. Raises UsageError where the file cannot be written."""
    try:
        with file.open("w", encoding="utf-8") as out:
            for answer in answers:
                prompt, _ = prompt_and_length(spec.seed, answer.index, spec.prompt_words, spec.output_tokens)
                out.write(json.dumps({"prompt": prompt} | asdict(answer)) + "\n")
    except OSError as error:
        raise UsageError(f"{file} could not be written ({error.strerror}): choose another file") from None


def differing_answers(first: Path, second: Path) -> tuple[int, list[int]]:
    """How many prompts both files hold, and the indices (in `first`) of those whose answers differ.

    Raises UsageError where a file cannot be read or the two share no prompt: then they tell nothing.
    """
    one, other = _read_answers(first), _read_answers(second)
    shared = [prompt for prompt in one if prompt in other]
    if not shared:
        raise UsageError(f"{first} and {second} share no prompt: use the same --seed, lengths and number of requests")
    keys = ("error", "text")
    return len(shared), [
        one[prompt]["index"] for prompt in shared if any(one[prompt][key] != other[prompt][key] for key in keys)
    ]


def _read_answers(file: Path) -> dict[str, dict[str, Any]]:
    try:
        answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return {answer["prompt"]: answer for answer in answers}
    except OSError as error:
        raise UsageError(f"{file} could not be read ({error.strerror}): give a file that --save wrote") from None
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{file} does not hold answers: give a file that --save wrote") from None
