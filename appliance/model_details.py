"""What was found out about a model: one value for `appliance inspect`, `/v1/models/{id}` and the page. Standard library
only: it travels from the engine process to the surfaces.

Sizes are in bytes, contexts in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Of a self-test."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class KernelTest:
    """One kernel against the float32 reference on real weights."""

    kernel: str
    phase: str
    """decode or prefill."""
    spec: str
    """Shape and storage of the layer, as in `LayerPlan.spec`."""
    layer: str
    """The module whose weight it was."""
    bound: float
    error: float | None
    """In units of the size that the terms of an output have together; None where there was no finite output."""
    reason: str = ""
    """Why it failed; empty where it passed."""


@dataclass(frozen=True, slots=True)
class RefusedKernel:
    """A candidate that does not run a layer, and why."""

    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All layers of one shape and storage."""

    layers: tuple[str, ...]
    """Their names, numbers as `*`, projections that run as one joined by ` + `."""
    count: int
    spec: str
    """Shape and storage in words; the next five say the same."""
    K: int
    N: int
    bits: int
    group_size: int
    """0 for dense weights."""
    act_order: bool
    decode: str
    """The kernel for rows that are decodes."""
    prefill: str
    refused: tuple[RefusedKernel, ...]
    nbytes: int
    """Of all of them, packed."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the self-test found."""

    verdict: Verdict
    summary: str
    faults: tuple[str, ...] = ()
    """Sentences: weights that cannot be right, layers that no kernel computes rightly."""
    kernels: tuple[KernelTest, ...] = ()
    """Those that were struck off too."""


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """What the model takes on the device it was planned for; measured where it is loaded."""

    total: int
    available: int
    """Free before the model was loaded."""
    weights: int
    step: int
    """Temporaries of the largest step."""
    kv_bytes_per_token: int
    kv_cache: int
    """Of the pool that the settings and the memory give; 0 where the weights alone do not fit."""
    max_model_len: int
    """The longest context that the model and the pool allow."""
    recurrent_state: int = 0
    """Of the slots of recurrent state, in models that have it."""


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """See the module's docstring."""

    model: str
    """Name of its folder or file, or its hub id."""
    format: str
    """gptq, awq, gguf, safetensors..."""
    description: str
    """For people, e.g. "GPTQ 4-bit, group 128, act-order"."""
    bits: int
    group_size: int
    """-1 for one group over all of K, 0 where nothing is quantised."""
    zero_points: str
    """How they are stored and read, in words."""
    act_order: bool
    exceptions: tuple[str, ...]
    """Modules that are quantised otherwise or not at all."""
    evidence: tuple[str, ...]
    warnings: tuple[str, ...]
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    """The context that config.json names."""
    num_parameters: int
    """Of the layers, the embedding and the norms."""
    file_bytes: int
    has_chat_template: bool | None
    """None where it was not looked for."""
    device: str
    dtype: str
    layers: tuple[LayerPlan, ...]
    self_test: SelfTest
    memory: ExpectedMemory
