"""What the recurrent layers of a model remember, of all requests, in slots of fixed size. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.models.gated_delta_config import GatedDeltaConfig


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """tails [layers, slots, kernel_size - 1, channels]: the convolution's last inputs, in the compute dtype.
    deltas [layers, slots, value heads, key_dim, value_dim]: float32. A slot that nobody has written holds anything.
    """

    tails: Tensor
    deltas: Tensor

    @classmethod
    def allocate(
        cls, config: GatedDeltaConfig, num_layers: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> RecurrentState:
        tails = (num_layers, num_slots, config.kernel_size - 1, config.num_channels)
        deltas = (num_layers, num_slots, config.num_value_heads, config.key_dim, config.value_dim)
        # Not zeroed: on a CPU only what is written takes memory.
        return cls(
            torch.empty(tails, dtype=dtype, device=device), torch.empty(deltas, dtype=torch.float32, device=device)
        )

    @property
    def nbytes(self) -> int:
        return self.tails.nbytes + self.deltas.nbytes

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots, (source, destination), one after the other."""
        for source, destination in copies:
            self.tails[:, destination] = self.tails[:, source]
            self.deltas[:, destination] = self.deltas[:, source]


def bytes_per_slot(config: GatedDeltaConfig, num_layers: int, dtype: torch.dtype) -> int:
    """What one request takes, of all layers."""
    tail = (config.kernel_size - 1) * config.num_channels * dtype.itemsize
    return num_layers * (tail + 4 * config.value_size * config.key_dim)
