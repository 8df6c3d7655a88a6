"""An engine process without a model: `python echo_engine.py BEHAVIOUR ADDRESS CONFIG`, where the real one is
`python -m appliance.engine ADDRESS CONFIG`.

It answers with the prompt's own tokens, then an end of sequence. BEHAVIOUR says how it loads: "well", "late" (never),
"refusing", "broken", "dying", or "once" (dying from the second load on; a file beside the model folder remembers).
A prompt that starts with DIE kills the process at its third step, one that starts with WAIT is never answered.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from appliance.client import EngineStats, FinishReason, ModelInfo, Priority, TokenLogprobs
from appliance.config import EngineConfig
from appliance.engine.__main__ import run
from appliance.engine.request import StepOutput
from appliance.errors import CheckpointError, ContextLengthError, QueueFullError
from appliance.sampling_params import SamplingParams

VOCAB_SIZE = 268
"""Of the byte-level tokenizer in tokenizer_files.py."""
END, DIE, WAIT = 266, 265, 267
MAX_MODEL_LEN = 512
MAX_WAITING = 100
STEP_S = 0.001


class EchoCore:
    """Satisfies `appliance.engine.__main__.Core`."""

    def __init__(self, config: EngineConfig) -> None:
        self.model_info = ModelInfo(
            id=config.served_name or config.model,
            created=0,
            architecture="Echo",
            format="none",
            bits=16,
            kernels=(),
            dtype="float32",
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            num_kv_blocks=64,
            block_size=16,
            num_contexts=2,
            has_chat_template=False,
        )
        self._requests: dict[str, tuple[list[int], SamplingParams, int]] = {}
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: Priority,
        child_index: int,
    ) -> None:
        if len(prompt_token_ids) >= MAX_MODEL_LEN:
            raise ContextLengthError(len(prompt_token_ids), params.max_tokens or 1, MAX_MODEL_LEN)
        if len(self._requests) >= MAX_WAITING:
            raise QueueFullError(f"{MAX_WAITING} requests wait: try again later")
        assert request_id not in self._requests
        self._requests[request_id] = (prompt_token_ids, params, 0)

    def abort(self, request_id: str) -> bool:
        return self._requests.pop(request_id, None) is not None

    def step(self) -> list[StepOutput]:
        time.sleep(STEP_S)
        self._num_steps += 1
        outputs = []
        for request_id, (prompt, params, position) in list(self._requests.items()):
            if prompt[0] == DIE and position == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if prompt[0] == WAIT:
                continue
            token = prompt[position] if position < len(prompt) else END
            reason = FinishReason.STOP if token == END and not params.ignore_eos else None
            if reason is None and position + 1 == params.max_tokens:
                reason = FinishReason.LENGTH
            outputs.append(
                StepOutput(
                    request_id,
                    (token,),
                    reason,
                    None,
                    len(prompt),
                    0,
                    _scored([token], params.logprobs),
                    _scored(prompt[1:], params.prompt_logprobs) if position == 0 else (),
                )
            )
            self._num_tokens += 1
            if reason is None:
                self._requests[request_id] = (prompt, params, position + 1)
            else:
                del self._requests[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            requests_running=len(self._requests), steps=self._num_steps, generation_tokens=self._num_tokens
        )


def _scored(token_ids: list[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Every token is certain, where that is asked for."""
    if num_top is None:
        return ()
    return tuple(TokenLogprobs(token_id, 0.0, ((token_id, 0.0),) * min(num_top, 1)) for token_id in token_ids)


def _load(behaviour: str) -> Callable[[EngineConfig, Callable[[str, float], None]], EchoCore]:
    def load(config: EngineConfig, progress: Callable[[str, float], None]) -> EchoCore:
        progress("loading", 0.5)
        marker = Path(config.model + ".loaded")
        if behaviour == "late":
            time.sleep(600)
        elif behaviour == "refusing":
            raise CheckpointError("the checkpoint is odd: get another one")
        elif behaviour == "broken":
            raise ValueError("a driver's words")
        elif behaviour == "dying" or (behaviour == "once" and marker.exists()):
            os._exit(9)
        marker.touch()
        return EchoCore(config)

    return load


if __name__ == "__main__":
    sys.exit(run(_load(sys.argv[1]), sys.argv[2:]))
