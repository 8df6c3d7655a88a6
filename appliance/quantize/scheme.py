"""What to make of the weights: method, bits and group size, and which models and shapes each method takes.

Facts of auto-gptq 0.7.1 (modeling/_const.py, qlinear_cuda_old.py) and autoawq 0.2.9 (quantize/quantizer.py: its search
for clipping takes outputs 64 at a time; modules/linear/gemm.py: 4 bits, no single group).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import UnsupportedModelError, UsageError


@dataclass(frozen=True, slots=True)
class _Method:
    """Allowed values; K and N of every layer are multiples of `rows` and `columns`."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    model_types: tuple[str, ...]
    rows: int
    columns: int


_GROUP_SIZES = (16, 32, 64, 128)
_METHODS = {
    "awq": _Method((4,), _GROUP_SIZES, ("llama", "mistral", "qwen2", "qwen3"), 16, 64),
    "gptq": _Method((2, 3, 4, 8), (-1, *_GROUP_SIZES), ("llama", "mistral", "qwen2"), 32, 32),
    "rtn": _Method((4, 8), (-1, *_GROUP_SIZES), ("llama", "mistral", "ministral", "qwen2", "qwen3"), 32, 32),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How to quantise. method: awq, gptq, or rtn (round to nearest, in GPTQ's layout); group_size -1 is all of K.

    Raises UsageError naming the value found and those allowed.
    """

    method: str
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise UsageError(f"--method {self.method} is not known: use {_listed(tuple(_METHODS))}")
        for flag, value, allowed in (
            ("--bits", self.bits, self._allowed.bits),
            ("--group-size", self.group_size, self._allowed.group_sizes),
        ):
            if value not in allowed:
                raise UsageError(f"{flag} {value} is not possible with --method {self.method}: use {_listed(allowed)}")

    @property
    def _allowed(self) -> _Method:
        return _METHODS[self.method]

    def check_model(self, model_type: object) -> None:
        """Raises UnsupportedModelError where the method's package does not know this kind of model."""
        if model_type in self._allowed.model_types:
            return
        others = tuple(name for name, method in _METHODS.items() if model_type in method.model_types)
        remedy = f"use --method {_listed(others)}" if others else "no other method takes it"
        raise UnsupportedModelError(
            f"the model is of type {model_type}, --method {self.method} takes {_listed(self._allowed.model_types)}: "
            f"{remedy}"
        )

    def check_shapes(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """shapes: module -> (N, K). Raises UsageError naming the first module that cannot be quantised so."""
        for module, (N, K) in shapes.items():
            if self.group_size != -1 and K % self.group_size:
                fitting = tuple(
                    size
                    for size in self._allowed.group_sizes
                    if size == -1 or all(inputs % size == 0 for _, inputs in shapes.values())
                )
                remedy = f"use --group-size {_listed(fitting)}" if fitting else "this method cannot quantise it"
                raise UsageError(
                    f"{module} has {K} inputs, which --group-size {self.group_size} does not divide: {remedy}"
                )
            if K % self._allowed.rows or N % self._allowed.columns:
                raise UsageError(
                    f"{module} has {K} inputs and {N} outputs, --method {self.method} takes multiples of "
                    f"{self._allowed.rows} and {self._allowed.columns}: this model cannot be quantised with it"
                )

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json that says what was done."""
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }


def _listed(values: tuple[object, ...]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
