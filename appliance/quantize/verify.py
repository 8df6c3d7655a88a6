"""Reading back what was written and comparing it with what it was made of. It trusts no package's success."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from appliance.errors import QuantizationError
from appliance.quant.checkpoint import Checkpoint, open_checkpoint
from appliance.quant.weight import QuantizedWeight
from appliance.quantize.scheme import Scheme
from appliance.quantize.source import Source

# Modules whose inputs are a norm's outputs, with that norm. AWQ divides the norm by what it multiplies the columns
# with, so that only the two together can be compared; the other modules it rescales by one another.
_COMPARED = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
}
# Of Frobenius norms. Rounding costs about 0.01 at 8 bits, 0.1 at 4, 0.25 at 3 and 0.6 at 2; codes or zero points read
# in a wrong order cost above 1.
_ABSURD = {8: 0.1, 4: 0.4, 3: 0.6, 2: 0.95}


@dataclass(frozen=True, slots=True)
class Verdict:
    """description: what the folder was found to hold. errors: module -> relative error of its weight."""

    description: str
    errors: dict[str, float]


def verify(source: Source, scheme: Scheme, folder: Path) -> Verdict:
    """Raises QuantizationError where a weight is missing, not finite or nothing like the original, CheckpointError
    where the folder cannot be read.
    """
    written = open_checkpoint(folder)
    _check_all(source, scheme, written)
    layers = sorted({int(module.split(".")[2]) for module in source.shapes})
    errors = {}
    for layer in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])):
        block = f"model.layers.{layer}"
        for name, norm in _COMPARED.items():
            errors[f"{block}.{name}"] = _error(source.checkpoint, written, f"{block}.{name}", f"{block}.{norm}.weight")
    for module, error in errors.items():
        if not error < _ABSURD[scheme.bits]:
            raise QuantizationError(
                f"{module} was written with a relative error of {error:.2f}, {scheme.bits} bits allow for one below "
                f"{_ABSURD[scheme.bits]}: the result was thrown away, try another method or group size"
            )
    return Verdict(describe_written(written), errors)


def describe_written(checkpoint: Checkpoint) -> str:
    """What a user is told about the folder that was written."""
    return "\n".join([checkpoint.report.describe(), *checkpoint.report.warnings])


def _check_all(source: Source, scheme: Scheme, written: Checkpoint) -> None:
    missing = set(source.checkpoint.names()) - set(written.names()) - {"lm_head.weight"}
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
        if not isinstance(weight, QuantizedWeight) or (weight.bits, weight.group_size) != (scheme.bits, size):
            raise QuantizationError(
                f"{module} was not written with {scheme.bits} bits in groups of {size}, so the result was thrown away: "
                "report this"
            )
        assert (weight.N, weight.K) == (N, K), f"{module} is read as {weight.N} x {weight.K}, expected {N} x {K}"


def _error(original: Checkpoint, written: Checkpoint, module: str, norm: str) -> float:
    expected = original.tensor(f"{module}.weight").float() * original.tensor(norm).float()
    found = written.tensor(f"{module}.weight") * written.tensor(norm).float()
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))
