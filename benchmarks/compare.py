"""Two servers under the same load, in turn: A, B, A, B, ... Medians, and the median of each round's ratio A / B.

    python -m benchmarks.compare --rounds 3 \\
        --a "ours=appliance serve FOLDER --port {port} --no-ui" \\
        --b "flask=python -m benchmarks.flask_baseline FOLDER --port {port}"

A server is started with a free port in place of {port}, is ready once GET /health or GET /v1/models answers 200, and is
ended, with every process of its group, before the other one starts. Every round has a new seed, the same for both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.bench.http import Endpoint
from appliance.bench.load import LoadSpec, first_model, run_load
from appliance.bench.prompts import Range
from appliance.bench.report import Report
from appliance.errors import ApplianceError, UsageError

_GRACE_S = 10.0

METRICS = (
    ("output_tokens_per_s", "output tokens/s", 1.0),
    ("requests_per_s", "requests/s", 1.0),
    ("ttft_p50", "TTFT p50, ms", 1000.0),
    ("tpot_p50", "time per output token p50, ms", 1000.0),
)
"""Key, name for people, and factor from the key's unit to the name's."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server: what to call it and the command that starts it, with {port} where the port belongs."""

    name: str
    command: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        """`NAME=COMMAND`. Raises UsageError."""
        name, equals, command = text.partition("=")
        if not name or not equals or "{port}" not in command:
            raise UsageError(f"{text!r} names no server: write NAME=COMMAND, with {{port}} in the command")
        return cls(name, command)


def machine() -> str:
    """Processor, cores of this process and memory, in one line."""
    processor = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown processor",
    )
    total_kib = int(Path("/proc/meminfo").read_text().split("MemTotal:", 1)[1].split()[0])
    return f"{processor}, {len(os.sched_getaffinity(0))} cores, {total_kib / (1 << 20):.0f} GiB"


@contextlib.contextmanager
def running(peer: Peer, start_timeout_s: float) -> Iterator[str]:
    """Start a server, wait until it answers, yield its URL, end it. Raises ApplianceError if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = shlex.split(peer.command.replace("{port}", str(port)))
    with tempfile.TemporaryFile("w+") as log:
        # A group of its own, so that its helpers end with it and nothing else does.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + start_timeout_s
            while not _answers(url):
                if _has_ended(process) or time.monotonic() > deadline:
                    log.seek(0)
                    last = "".join(log.readlines()[-20:])
                    raise ApplianceError(
                        f"{peer.name} did not come up ({shlex.join(command)}); its last words:\n{last}"
                    )
                time.sleep(0.2)
            yield url
        finally:
            _end_group(process)


def compare(
    peers: Sequence[Peer], spec: LoadSpec, concurrencies: Sequence[int], rounds: int, start_timeout_s: float
) -> dict[str, Any]:
    """Measure two peers in turn; everything that was found, as JSON values.

    `spec` is the load but for seed, model and concurrency: a run at c has at least two requests for each caller.
    """
    runs: list[dict[str, Any]] = []
    for number in range(rounds):
        for peer in peers:
            with running(peer, start_timeout_s) as url:
                endpoint = Endpoint.parse(url)
                for concurrency in concurrencies:
                    seed = spec.seed + number * len(concurrencies) + concurrencies.index(concurrency)
                    report = asyncio.run(_measure(endpoint, spec, seed, concurrency))
                    rate = report.output_tokens_per_s
                    _say(f"round {number + 1}/{rounds} {peer.name} c={concurrency}: {rate:.1f} output tokens/s")
                    runs.append({"peer": peer.name, "round": number, "concurrency": concurrency, **_numbers(report)})
    return {
        "machine": machine(),
        "commands": {peer.name: peer.command for peer in peers},
        "runs": runs,
        "medians": [_medians(runs, peers, concurrency) for concurrency in concurrencies],
    }


def markdown(found: dict[str, Any]) -> str:
    """The table of docs/performance.md."""
    (ours, our_command), (peer, peer_command) = found["commands"].items()
    lines = [
        f"{found['machine']}",
        "",
        f"- {ours}: `{our_command}`",
        f"- {peer}: `{peer_command}`",
        "",
        f"| concurrent requests | measure | {ours} | {peer} | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in found["medians"]:
        for key, name, factor in METRICS:
            if row[key] is not None:
                a, b, ratio = row[key]
                lines.append(f"| {row['concurrency']} | {name} | {a * factor:.4g} | {b * factor:.4g} | {ratio:.2f} |")
    errors = sum(run["num_failed"] for run in found["runs"])
    return "\n".join([*lines, "", f"Requests that failed: {errors}."])


async def _measure(endpoint: Endpoint, spec: LoadSpec, seed: int, concurrency: int) -> Report:
    assert spec.num_requests is not None, "a comparison counts requests"
    load = LoadSpec(
        model=await first_model(endpoint),
        prompt_words=spec.prompt_words,
        output_tokens=spec.output_tokens,
        seed=seed,
        concurrency=concurrency,
        num_requests=max(spec.num_requests, 2 * concurrency),
        warmup=2,
        stream=spec.stream,
        timeout_s=spec.timeout_s,
    )
    return Report.of(await run_load(endpoint, load))


def _numbers(report: Report) -> dict[str, Any]:
    return {
        "output_tokens_per_s": report.output_tokens_per_s,
        "requests_per_s": report.requests_per_s,
        "ttft_p50": report.ttft.p50 if report.ttft else None,
        "tpot_p50": report.tpot.p50 if report.tpot else None,
        "num_ok": report.num_ok,
        "num_failed": sum(report.errors.values()),
        "errors": report.errors,
    }


def _medians(runs: list[dict[str, Any]], peers: Sequence[Peer], concurrency: int) -> dict[str, Any]:
    """For each measure: either peer's median and that of the rounds' ratios first / second; None where unknown."""
    row: dict[str, Any] = {"concurrency": concurrency}
    for key, _, _ in METRICS:
        a, b = (
            [run[key] for run in runs if run["peer"] == peer.name and run["concurrency"] == concurrency]
            for peer in peers
        )
        is_known = all(a) and all(b)
        row[key] = (
            [statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in zip(a, b, strict=True))]
            if is_known
            else None
        )
    return row


def _answers(url: str) -> bool:
    for path in ("/health", "/v1/models"):
        try:
            with urllib.request.urlopen(url + path, timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            if error.code != 404:  # 404: the server has no such path, ask for the other one
                return False
        except OSError:
            return False
    return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without taking its exit status: until that is taken, nobody else can get its id or its group's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the group; when its leader has ended, or some seconds later, SIGKILL to what is left of it."""
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, metavar="NAME=COMMAND", help="ours")
    parser.add_argument("--b", required=True, metavar="NAME=COMMAND", help="the peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--num-requests", type=int, default=16, help="of each run; at least 2 for each caller")
    parser.add_argument("--prompt-words", default="100")
    parser.add_argument("--output-tokens", default="64")
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: a new one every second")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds for a server to come up")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    options = parser.parse_args(arguments)
    try:
        peers = Peer.parse(options.a), Peer.parse(options.b)
        spec = LoadSpec(
            model="",
            prompt_words=Range.parse(options.prompt_words, "--prompt-words"),
            output_tokens=Range.parse(options.output_tokens, "--output-tokens"),
            seed=options.seed,
            concurrency=1,
            num_requests=options.num_requests,
            stream=options.stream,
        )
        if options.rounds < 1:
            raise UsageError(f"rounds must be at least 1, found {options.rounds}")
        found = compare(peers, spec, options.concurrency, options.rounds, options.start_timeout)
    except ApplianceError as error:
        _say(f"error: {error.message}")
        return error.exit_code
    print(markdown(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
