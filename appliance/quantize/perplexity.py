"""Perplexity of a model folder, with the appliance's own engine, in a process of its own that gives its memory back."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError
from appliance.model_cache import Progress
from appliance.quantize.child import run_child

_BLOCK_SIZE = 16
_REQUESTS = 4


def perplexity(folder: Path, blocks: list[list[int]], log: Path, progress: Progress) -> float:
    """exp of the mean negative log probability of every token of `blocks` but each one's first.

    Raises QuantizationError with the engine's reason where it cannot be measured.
    """
    command = [sys.executable, "-P", "-m", "appliance.quantize.perplexity"]  # -P: nothing of the working folder
    return float(run_child(command, {"folder": str(folder), "blocks": blocks}, log, progress))


def measure(folder: str, blocks: list[list[int]], progress: Progress) -> float:
    """As `perplexity`, in this process."""
    from appliance import LLM, SamplingParams

    longest = max(map(len, blocks))
    llm = LLM(
        folder,
        max_model_len=longest + 1,  # a context has room for an answer
        block_size=_BLOCK_SIZE,
        num_kv_blocks=_REQUESTS * (longest // _BLOCK_SIZE + 2),
        max_num_seqs=_REQUESTS,
        enable_prefix_caching=False,
    )
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    logprobs: list[float] = []
    for index, block in enumerate(blocks):
        progress("Measuring perplexity", index / len(blocks))
        [output] = llm.generate([block], params)
        logprobs += [entry.logprob for entry in output.prompt_logprobs]
    return math.exp(-sum(logprobs) / len(logprobs))


def _main() -> int:
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no message
    job = json.loads(sys.stdin.readline())

    def end_with_the_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()

    def send(**message: Any) -> None:
        print(json.dumps(message), file=messages, flush=True)

    try:
        result = measure(job["folder"], job["blocks"], lambda what, fraction: send(progress=[what, fraction]))
    except ApplianceError as error:
        send(error=error.message)
        return 1
    send(result=result)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
