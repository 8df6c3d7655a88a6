"""Reading back what was written and comparing it with what it was made of. It trusts no package's success."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from appliance.config import EngineConfig
from appliance.errors import QuantizationError
from appliance.inspection import inspect_model
from appliance.model_details import Verdict as SelfTestVerdict
from appliance.quant.checkpoint import Checkpoint, open_checkpoint
from appliance.quant.weight import QuantizedWeight
from appliance.quantize.scheme import Scheme
from appliance.quantize.source import Source

# Block by block: modules that read a norm's outputs, with that norm; those that the next module undoes the scale of.
_AFTER_NORM = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
_NEXT = {"self_attn.v_proj": "self_attn.o_proj", "mlp.up_proj": "mlp.down_proj"}
# Of Frobenius norms. Rounding costs about 0.01 at 8 bits, 0.1 at 4, 0.3 at 3 and 0.7 at 2; codes or zero points read
# in a wrong order cost about 1.4.
_ABSURD = {8: 0.1, 4: 0.45, 3: 0.7, 2: 1.2}


@dataclass(frozen=True, slots=True)
class Verdict:
    """description: what the folder was found to hold. self_test: the verdict of the test that loading makes.
    errors: module -> relative error of its weight.
    """

    description: str
    self_test: str
    errors: dict[str, float]


def verify(source: Source, scheme: Scheme, folder: Path) -> Verdict:
    """Raises QuantizationError where a weight is missing, not finite or nothing like the original, CheckpointError
    where the folder cannot be read.
    """
    written = open_checkpoint(folder)
    _check_all(source, scheme, written)
    layers = sorted({int(module.split(".")[2]) for module in source.shapes})
    errors: dict[str, float] = {}
    for layer in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])):
        errors |= _errors(source.checkpoint, written, f"model.layers.{layer}")
    for module, error in errors.items():
        if not error < _ABSURD[scheme.bits]:
            raise QuantizationError(
                f"{module} was written with a relative error of {error:.2f}, {scheme.bits} bits allow for one below "
                f"{_ABSURD[scheme.bits]}: the result was thrown away, try another method or group size"
            )
    details = inspect_model(str(folder), EngineConfig(str(folder)), lambda what, done: None)
    if details.self_test.verdict is not SelfTestVerdict.PASSED:
        raise QuantizationError(
            f"what was written does not pass its self-test ({details.self_test.summary}): the result was thrown away, "
            "try another method or group size"
        )
    description = "\n".join([written.report.describe(), *written.report.warnings])
    return Verdict(description, details.self_test.summary, errors)


def _check_all(source: Source, scheme: Scheme, written: Checkpoint) -> None:
    missing = set(source.checkpoint.names()) - set(written.names())
    if source.config.get("tie_word_embeddings"):
        missing.discard("lm_head.weight")  # a copy that some files hold
    if missing:
        raise QuantizationError(f"{sorted(missing)[0]} was not written, so the result was thrown away: report this")
    for name in written.names():
        module = name.removesuffix(".weight")
        if module not in source.shapes:
            if not bool(written.tensor(name).isfinite().all()):
                raise QuantizationError(
                    f"{name} does not fit float16, in which it is written: use --method rtn, which keeps its type"
                )
            continue
        weight = written.linear(module)
        N, K = source.shapes[module]
        size = K if scheme.group_size == -1 else scheme.group_size
        wanted = (N, K, scheme.bits, size)
        if not isinstance(weight, QuantizedWeight) or (weight.N, weight.K, weight.bits, weight.group_size) != wanted:
            raise QuantizationError(
                f"{module} was not written as {N} x {K} with {scheme.bits} bits in groups of {size}, so the result was "
                "thrown away: report this"
            )


def _errors(original: Checkpoint, written: Checkpoint, block: str) -> dict[str, float]:
    """Relative errors of a block's weights against what was rounded to get them.

    AWQ first multiplies columns of a weight and divides what they are multiplied with by the same numbers: the norm
    before, or the rows of the module before it. The norms' tell the former; the latter are found by least squares.
    """
    errors = {}
    for name, norm in _AFTER_NORM.items():
        norms = [c.tensor(f"{block}.{norm}.weight").float() for c in (original, written)]
        columns = torch.where(norms[1] == 0, 1.0, norms[0] / norms[1])
        expected = original.tensor(f"{block}.{name}.weight").float() * columns
        found = written.tensor(f"{block}.{name}.weight")
        if name in _NEXT:
            rows = (found * expected).sum(1) / expected.square().sum(1).clamp(min=1e-30)
            expected_next = original.tensor(f"{block}.{_NEXT[name]}.weight").float()
            if len(rows) == expected_next.shape[1]:  # with shared KV heads they differ, and AWQ leaves both alone
                expected = expected * rows.unsqueeze(1)
                expected_next = expected_next / rows.where(rows != 0, 1.0)
            errors[f"{block}.{_NEXT[name]}"] = _relative(written.tensor(f"{block}.{_NEXT[name]}.weight"), expected_next)
        errors[f"{block}.{name}"] = _relative(found, expected)
    return errors


def _relative(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))
