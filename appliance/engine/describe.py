"""Puts what was found out about a model into the one value that all surfaces show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.generation_config import has_chat_template
from appliance.kernels.registry import LinearPlan
from appliance.model_details import ExpectedMemory, LayerPlan, ModelDetails, RefusedKernel, SelfTest
from appliance.models.config import ModelConfig
from appliance.models.weights import WeightReader
from appliance.quant.planner import PlannedLayer
from appliance.quant.report import FormatReport


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known of a model besides its tensors. has_chat_template: None where it was not looked for."""

    name: str
    nbytes: int
    has_chat_template: bool | None

    @classmethod
    def at(cls, path: Path) -> ModelFiles:
        """Of a folder or a .gguf file."""
        files = path.glob("*.safetensors") if path.is_dir() else [path]
        return cls(path.name, sum(file.stat().st_size for file in files if file.is_file()), has_chat_template(path))


def describe_model(
    files: ModelFiles,
    report: FormatReport,
    reader: WeightReader,
    config: ModelConfig,
    architecture: str,
    device: str,
    memory: ExpectedMemory,
    self_test: SelfTest,
) -> ModelDetails:
    """reader: whose planner has seen every layer."""
    return ModelDetails(
        model=files.name,
        format=report.format,
        description=report.describe(),
        bits=report.bits,
        group_size=report.group_size,
        zero_points=_zero_points(report),
        act_order=report.act_order,
        exceptions=report.exceptions,
        evidence=report.evidence,
        warnings=report.warnings,
        architecture=architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        num_parameters=reader.num_parameters,
        file_bytes=files.nbytes,
        has_chat_template=files.has_chat_template,
        device=device,
        dtype=str(reader.target.dtype).removeprefix("torch."),
        layers=layer_plans(reader.planner.layers),
        self_test=self_test,
        memory=memory,
    )


def layer_plans(layers: Sequence[PlannedLayer]) -> tuple[LayerPlan, ...]:
    """One entry for layers of one plan, in the order in which they were first met."""
    by_plan: dict[LinearPlan, list[PlannedLayer]] = {}
    for layer in layers:
        by_plan.setdefault(layer.plan, []).append(layer)
    return tuple(
        LayerPlan(
            layers=tuple(dict.fromkeys(_short_name(layer.name) for layer in alike)),
            count=len(alike),
            spec=str(plan.spec),
            K=plan.spec.K,
            N=plan.spec.N,
            bits=plan.spec.bits,
            group_size=plan.spec.group_size,
            act_order=plan.spec.has_perm,
            decode=plan.decode.name,
            prefill=plan.prefill.name,
            refused=tuple(RefusedKernel(name, reason) for name, reason in plan.rejected),
            nbytes=sum(layer.nbytes for layer in alike),
        )
        for plan, alike in by_plan.items()
    )


def _short_name(name: str) -> str:
    """`model.layers.0.mlp.gate_proj + model.layers.0.mlp.up_proj` -> `model.layers.*.mlp.gate_proj + up_proj`."""
    first, *others = re.sub(r"\.\d+\.", ".*.", name).split(" + ")
    return " + ".join([first, *(other.rpartition(".")[2] for other in others)])


def _zero_points(report: FormatReport) -> str:
    if report.symmetric is None:
        return "none, nothing is quantised"
    words = "symmetric" if report.symmetric else "asymmetric"
    convention = {"v1": ", stored less one (version 1)", "v2": ", stored as they are (version 2)"}
    return words + (convention.get(report.variant, "") if report.format == "gptq" else "")
