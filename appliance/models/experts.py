"""Where a checkpoint keeps a layer's router and experts, and reading them. The tensors decide, not the architecture.

BLOCK is model.layers.N.mlp, or block_sparse_moe for Mixtral; E experts, I their intermediate size, H the hidden size.
    BLOCK.gate                                 the router
    BLOCK.experts.M.{gate,up,down}_proj        one expert, each module quantised or not; Mixtral calls them w1, w3, w2
    BLOCK.experts.{gate_up_proj,down_proj}     all experts, [E, 2 * I, H] and [E, H, I] (transformers 5, plain only)
    BLOCK.shared_expert, shared_expert_gate    an MLP and the one row [1, H] of its gate
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import CheckpointError
from appliance.models.mixture_config import MixtureConfig
from appliance.models.weights import FusedLinear, WeightReader

_BLOCKS = ("mlp", "block_sparse_moe")
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class Expert:
    """gate and up of one input, side by side, and down."""

    gate_up: FusedLinear
    down: FusedLinear


def find_block(weights: WeightReader, layer: str) -> str:
    """The name before the router's, of layer `model.layers.N`. Raises CheckpointError if there is no router."""
    for name in _BLOCKS:
        if weights.has(f"{layer}.{name}.gate.weight"):
            return f"{layer}.{name}"
    raise CheckpointError(
        f"The checkpoint has no router {f'{layer}.{_BLOCKS[0]}.gate'!r}: it is incomplete or of another architecture."
    )


def read_experts(weights: WeightReader, block: str, config: MixtureConfig, hidden_size: int) -> list[Expert]:
    """The experts of one layer, one after the other."""
    size, prefix = config.intermediate_size, f"{block}.experts"
    if weights.has(f"{prefix}.gate_up_proj"):
        gate_up = weights.stack(f"{prefix}.gate_up_proj", (config.num_experts, 2 * size, hidden_size))
        down = weights.stack(f"{prefix}.down_proj", (config.num_experts, hidden_size, size))
        return [
            Expert(
                weights.single(f"{prefix}.{index}.gate_up_proj", gate_up[index]),
                weights.single(f"{prefix}.{index}.down_proj", down[index]),
            )
            for index in range(config.num_experts)
        ]
    found = (names for names in _NAMES if weights.has(f"{prefix}.0.{names[0]}.weight"))
    gate_name, up_name, down_name = next(found, _NAMES[0])
    return [
        Expert(
            weights.fused(f"{prefix}.{index}", {gate_name: size, up_name: size}, hidden_size, False),
            weights.fused(f"{prefix}.{index}", {down_name: hidden_size}, size, False),
        )
        for index in range(config.num_experts)
    ]
