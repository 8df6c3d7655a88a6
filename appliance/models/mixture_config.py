"""The shape of a mixture of experts: what an architecture's declaration makes of config.json."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import CheckpointError
from appliance.models.config_fields import ConfigFields

_MAX_EXPERTS = 1 << 12


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Layers in which a router sends each row to `top_k` of `num_experts` SwiGLU blocks of `intermediate_size`."""

    layers: frozenset[int]
    num_experts: int
    top_k: int
    intermediate_size: int
    is_normalized: bool
    """The weights of a row's experts are made to add up to one; else they are the router's probabilities."""
    shared_size: int = 0
    """Intermediate size of one more expert, which every row goes to, times the sigmoid of a gate; 0 for none."""

    @property
    def parameters_per_input(self) -> int:
        """Parameters of a layer's matrices for each of the hidden_size inputs."""
        return self.num_experts * (3 * self.intermediate_size + 1) + (3 * self.shared_size + 1) * bool(self.shared_size)

    def row_values(self, hidden_size: int) -> int:
        """The most numbers that a layer holds of one row besides its input (mixture.py): gathered inputs and what gate
        and up make of them, in parts and together; then the same of down; or what the shared expert holds.
        """
        gate_up = hidden_size + 4 * self.intermediate_size
        down = self.intermediate_size + 2 * hidden_size
        return max(self.top_k * max(gate_up, down), 3 * self.shared_size + 2 * hidden_size)


def read_mixture(
    fields: ConfigFields,
    layers: frozenset[int],
    *,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    is_normalized: bool,
    shared_size: int = 0,
) -> MixtureConfig | None:
    """The mixture of these layers, None if there is no such layer. Defaults are those of absent keys.

    `num_experts` is called `num_local_experts` by some writers. Raises CheckpointError naming the key, what was found
    and what was expected.
    """
    if not layers:
        return None
    key = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    experts = fields.integer(key, _MAX_EXPERTS, num_experts)
    chosen = fields.integer("num_experts_per_tok", _MAX_EXPERTS, top_k)
    if chosen > experts:
        raise CheckpointError(
            f"config.json says 'num_experts_per_tok' is {chosen} and {key!r} is {experts}: "
            "the first must be at most the second."
        )
    return MixtureConfig(
        layers=layers,
        num_experts=experts,
        top_k=chosen,
        intermediate_size=intermediate_size,
        is_normalized=is_normalized,
        shared_size=shared_size,
    )


def sparse_layers(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    """Qwen's: every `decoder_sparse_step`-th layer, counted from 1, that `mlp_only_layers` does not name."""
    step = fields.integer("decoder_sparse_step", 1 << 12, 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
