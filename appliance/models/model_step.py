"""What all layers of a model share in one step, besides the rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from appliance.kernels.backend import Attention
from appliance.kernels.gated_delta import StateRows
from appliance.models.recurrent_state import RecurrentState


@dataclass(frozen=True, slots=True, eq=False)
class ModelStep:
    """attentions: one a paged group. cache: [layers of a group, 2, num_blocks, num_kv_heads, block_size, head_dim].
    The first num_decode rows are decodes.
    """

    num_decode: int
    attentions: Sequence[Attention]
    cache: Tensor
    state_rows: StateRows | None = None
    """Of a model with recurrent layers, as is `state`."""
    state: RecurrentState | None = None
