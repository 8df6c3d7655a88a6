"""A mixture of experts in the place of an MLP: a router sends each row to a few of many small MLPs.

A row's result depends on the row alone: its experts are added in the order of its own scores, and every layer's rows
are independent of each other (kernels/cpu_int4, cpu_onednn).
"""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.kernels.backend import Backend
from appliance.models.experts import find_block, read_experts
from appliance.models.mixture_config import MixtureConfig
from appliance.models.mlp import Mlp
from appliance.models.weights import WeightReader

_SUMMED_ROWS = 256
"""Rows whose experts are added at a time, so that their float32 products take little memory."""


class Mixture:
    """Router and shared gate are computed in float32: in 16 bits, experts of nearly equal scores would tie."""

    def __init__(
        self, config: MixtureConfig, weights: WeightReader, backend: Backend, layer: str, hidden_size: int
    ) -> None:
        """layer: the name before the block's, `model.layers.N`. Raises CheckpointError naming what is not there."""
        self.config = config
        self.backend = backend
        block = find_block(weights, layer)
        outputs = {f"{block}.gate": config.num_experts}
        self.shared: Mlp | None = None
        if config.shared_size:
            outputs[f"{block}.shared_expert_gate"] = 1
            self.shared = Mlp(weights, backend.silu_and_mul, f"{block}.shared_expert", hidden_size, config.shared_size)
        self.router = weights.float32(outputs, hidden_size)
        self.experts = read_experts(weights, block, config, hidden_size)
        self._edges = torch.arange(2 * config.num_experts + 1, device=backend.device)

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        """x [T, H], whose first num_decode rows are decodes -> [T, H]. Waits once for the device, for the choice."""
        scores = self.router(x.float())
        shares, chosen = self._choose(scores[:, : self.config.num_experts])
        # Sorted by expert, and an expert's decodes before its prefill rows.
        keys = chosen * 2
        keys[num_decode:] += 1
        keys, order = keys.flatten().sort(stable=True)
        edges = torch.searchsorted(keys, self._edges).tolist()
        runs = [
            (expert, slice(edges[2 * i], edges[2 * i + 2]), edges[2 * i + 1] - edges[2 * i])
            for i, expert in enumerate(self.experts)
            if edges[2 * i] < edges[2 * i + 2]
        ]
        rows = x.index_select(0, order // self.config.top_k)
        rows = torch.cat([expert.gate_up(rows[run], decodes) for expert, run, decodes in runs])
        rows = self.backend.silu_and_mul(rows)
        rows = torch.cat([expert.down(rows[run], decodes) for expert, run, decodes in runs])
        rows = torch.empty_like(rows).index_copy_(0, order, rows).view(*chosen.shape, -1)
        y = torch.cat(
            [
                (parts * share.unsqueeze(-1)).sum(1)
                for parts, share in zip(torch.split(rows, _SUMMED_ROWS), torch.split(shares, _SUMMED_ROWS), strict=True)
            ]
        )
        if self.shared is not None:
            y += scores[:, -1:].sigmoid() * self.shared(x, num_decode)
        return y.to(x.dtype)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's experts, best first, and their shares in its result: [T, top_k] float32 and int64."""
        shares, chosen = scores.softmax(-1).topk(self.config.top_k)
        if self.config.is_normalized:
            shares /= shares.sum(-1, keepdim=True)
        return shares, chosen
