"""How an engine is to run: one frozen value, handed to the engine process as JSON. Standard library only."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from appliance.errors import UsageError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Raises UsageError naming the setting, what was found and what is allowed.
    """

    model: str
    """Folder of a checkpoint, or a .gguf file."""
    served_name: str = ""
    """Name for `/v1/models`; empty takes the folder's."""
    device: str = "auto"
    dtype: str = "auto"
    """auto, bfloat16, float16 (on a CPU computed in bfloat16) or float32, the exact mode."""
    max_model_len: int | None = None
    """None: the longest context that fits the model and the memory."""
    block_size: int = 16
    num_kv_blocks: int | None = None
    """None: sized from kv_cache_bytes or from memory."""
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """Tokens of one step, decodes first, the rest prefill."""
    enable_prefix_caching: bool = True
    allow_failed_self_test: bool = False
    """Serve a model whose weights or kernels failed the test at load, with warnings."""
    max_waiting: int = 1024
    """Requests in the queue before 429."""
    num_threads: int = 0
    """Torch threads; 0 takes all cores of this process."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float16", "half", "float32", "float"):
            raise UsageError(f"dtype {self.dtype!r} is not known: use auto, bfloat16, float16 or float32")
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device {self.device!r} is not known: use auto, cpu or cuda")
        if self.block_size not in (16, 32, 64):
            raise UsageError(f"block size {self.block_size} is not supported: use 16, 32 or 64")
        for name in ("enable_prefix_caching", "allow_failed_self_test"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, found {getattr(self, name)!r}")
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                self._check_integer(name, 1)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            self._check_integer(name, 1)
        self._check_integer("num_threads", 0)

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} must be an integer of at least {least}, found {value!r}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        return cls(**json.loads(text))
