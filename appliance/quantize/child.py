"""Work in a process of its own: a job as one line of JSON in, progress and the result as lines of JSON out.

    {"progress": [what, fraction]}    {"error": sentence}    {"result": ...}

The child's stdin stays open while it is wanted: one that sees it close ends itself, so that none outlives this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.errors import QuantizationError
from appliance.model_cache import Progress


def run_child(
    command: Sequence[str],
    job: dict[str, Any],
    log: Path,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """The result of `command` for `job`. What it writes to stderr goes to `log`, which is kept only if that fails
    without a sentence of its own. `environment` is added to this process's.

    Raises QuantizationError with the child's own sentence, or with the last line of its log.
    """
    keep_log = False
    try:
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command,
                env=os.environ | (environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
            ) as child,
        ):
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):  # it died at once; its log says why
                    child.stdin.write(json.dumps(job) + "\n")
                    child.stdin.flush()
                for line in child.stdout:
                    message = json.loads(line)
                    if "error" in message:
                        raise QuantizationError(message["error"])
                    if "result" in message:
                        return message["result"]
                    progress(*message["progress"])
                child.wait()
            finally:
                child.kill()
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
        keep_log = True
        raise QuantizationError(f"{_reason(child.returncode, log)} (the whole output is in {log})")
    finally:
        if not keep_log:
            log.unlink(missing_ok=True)


def _reason(status: int, log: Path) -> str:
    if status < 0:
        return f"the process that computes it was ended by signal {-status}, perhaps for lack of memory"
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"the process that computes it failed: {lines[-1] if lines else f'it ended with {status}'}"
