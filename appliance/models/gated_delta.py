"""A gated delta layer: what stands in the place of attention in layers that keep a state of fixed size, not a cache.

Tensors: prefix.{in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj} (linear), conv1d.weight [channels, 1, kernel],
A_log and dt_bias [value heads], norm.weight [value_dim]. Source: transformers 5.24 models/qwen3_5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.backend import Backend
from appliance.kernels.gated_delta import StateRows
from appliance.models.config import ModelConfig
from appliance.models.gated_delta_config import GatedDeltaConfig
from appliance.models.model_step import ModelStep
from appliance.models.weights import WeightReader


class GatedDelta:
    """Mixes rows [T, hidden_size] of a step, decodes first, with the states of their requests.

    Between the linear layers everything is computed in float32, whatever the compute dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: GatedDeltaConfig,
        weights: WeightReader,
        backend: Backend,
        index: int,
        part: int,
    ) -> None:
        """index: of the layer; part: of the recurrent state it keeps its own in."""
        prefix = f"model.layers.{index}.linear_attn"
        self.backend = backend
        self.shape = shape
        self.part = part
        self.eps = config.rms_norm_eps
        inputs = {"in_proj_qkv": shape.num_channels, "in_proj_z": shape.value_size}
        self.qkvz = weights.fused(prefix, inputs, config.hidden_size, False)
        # A pair of its own: quantisers leave these small ones plain.
        gates = {"in_proj_b": shape.num_value_heads, "in_proj_a": shape.num_value_heads}
        self.gates = weights.fused(prefix, gates, config.hidden_size, False)
        kernel = weights.tensor(f"{prefix}.conv1d.weight", (shape.num_channels, 1, shape.kernel_size))
        self.kernel = kernel.squeeze(1).t().contiguous()  # [kernel, channels]
        self.decay = -weights.tensor(f"{prefix}.A_log", (shape.num_value_heads,)).exp()
        self.dt_bias = weights.tensor(f"{prefix}.dt_bias", (shape.num_value_heads,))
        self.norm = weights.tensor(f"{prefix}.norm.weight", (shape.value_dim,))
        self.output = weights.fused(prefix, {"out_proj": config.hidden_size}, shape.value_size, False)

    def __call__(self, x: Tensor, angles: Sequence[tuple[Tensor, Tensor]], step: ModelStep) -> Tensor:
        """As of `SelfAttention`; but a state knows no positions, and angles are not looked at."""
        rows, state, shape = step.state_rows, step.state, self.shape
        assert rows is not None
        assert state is not None
        mixed, z = self.qkvz(x, step.num_decode).tensor_split([shape.num_channels], -1)
        b, a = self.gates(x, step.num_decode).float().chunk(2, -1)
        qkv = F.silu(self._convolve(mixed, state.tails[self.part], rows))
        q, k, v = qkv.tensor_split([shape.key_size, 2 * shape.key_size], -1)
        out = self.backend.gated_delta_rule(
            q.view(len(x), -1, shape.key_dim),
            k.view(len(x), -1, shape.key_dim),
            v.view(len(x), -1, shape.value_dim),
            self.decay * F.softplus(a + self.dt_bias),
            b.sigmoid(),
            state.deltas[self.part],
            rows,
        )
        normed = self.backend.rms_norm(out.reshape(-1, shape.value_dim), self.norm, self.eps)
        gated = normed.view(len(x), -1) * F.silu(z.float())
        return self.output(gated.to(x.dtype), step.num_decode)

    def _convolve(self, x: Tensor, tails: Tensor, rows: StateRows) -> Tensor:
        """[T, channels] float32: each channel of x [T, channels] with its own kernel, over the row and those before it,
        which for a request's first rows are in its slot of tails [slots, kernel - 1, channels]; that is carried on.
        """
        width, split, starts = len(self.kernel) - 1, rows.num_decode, rows.query_start_loc
        parts = []
        if split:
            slots = rows.slots[:split]
            seen = torch.cat([tails.index_select(0, slots), x[:split].unsqueeze(1)], 1)
            tails.index_copy_(0, slots, seen[:, 1:])
            parts.append(self._weigh(seen.unbind(1)))
        for i in range(split, len(rows.has_state)):
            slot, chunk = rows.slots[i : i + 1], x[starts[i] : starts[i + 1]]
            tail = tails.index_select(0, slot)[0] if rows.has_state[i] else torch.zeros_like(tails[0])
            padded = torch.cat([tail, chunk])
            tails.index_copy_(0, slot, padded[len(chunk) :].unsqueeze(0))
            parts.append(self._weigh([padded[j : j + len(chunk)] for j in range(width + 1)]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _weigh(self, seen: Sequence[Tensor]) -> Tensor:
        """The sum of rows [L, channels], oldest first, each times its row of the kernel."""
        total = seen[0].float() * self.kernel[0]
        for row, weight in zip(seen[1:], self.kernel[1:], strict=True):
            total.addcmul_(row.float(), weight)
        return total
