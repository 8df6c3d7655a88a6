"""What a checkpoint was found to hold: a value for people and for programs. It knows no file and no tensor."""

from __future__ import annotations

from dataclasses import dataclass

_LABELS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "gguf": "GGUF",
    "safetensors": "safetensors",
}


@dataclass(frozen=True, slots=True)
class FormatReport:
    """The format of a checkpoint and why it is believed to be that.

    format: gptq, awq, compressed-tensors, gguf, safetensors (not quantised) or canonical (the appliance's own folder).
    variant: the format's own word: v1 or v2 zero points (gptq), gemm, gemv... (awq), pack-quantized
        (compressed-tensors), Q4_1 or Q4_K+Q6_K (gguf: the types of its layers, that of most weights first), the dtype
        (safetensors), the source's description (canonical).
    bits: bits of a code; 0 when nothing is quantised.
    group_size: rows of K that share a scale; 0 when nothing is quantised, -1 for one group over all of K.
    symmetric: every zero point is the middle code; None where nothing is quantised.
    act_order: some module's rows are grouped by a permutation.
    exceptions: modules that differ from bits and group_size, one kind a line: `lm_head not quantised`,
        `model.layers.0.* 8-bit group 32`. Embeddings are not told.
    evidence: sentences, what was seen in tensors and configuration. warnings: sentences a user should read.
    """

    format: str
    bits: int
    group_size: int
    symmetric: bool | None
    act_order: bool
    evidence: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    variant: str = ""
    exceptions: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line, such as `GPTQ 4-bit, group 64, symmetric` or `GGUF Q4_1 4-bit, group 32`."""
        if self.format == "canonical":
            return f"{self.variant} (converted)"
        label = _LABELS[self.format]
        if self.bits == 0:
            return f"{label}, not quantised ({self.variant})"
        if self.format == "gguf":
            main, *others = self.variant.split("+")
            mix = f", other layers {', '.join(others)}" if others else ""
            return f"{label} {main} {self.bits}-bit, group {self.group_size}{mix}"
        group = "one group per column" if self.group_size == -1 else f"group {self.group_size}"
        parts = [f"{label} {self.bits}-bit", group, "symmetric" if self.symmetric else "asymmetric"]
        if self.act_order:
            parts.append("act-order")
        return ", ".join(parts)
