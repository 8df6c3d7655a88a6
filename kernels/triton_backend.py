"""A model's operations as Triton kernels, the gated delta rule excepted. Run interpreted and compiled offline only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from appliance.kernels.backend import PagedLayout
from appliance.kernels.gated_delta import StateRows, gated_delta_rule
from appliance.kernels.triton_attention import TritonAttention
from appliance.kernels.triton_gated import gelu_and_mul, silu_and_mul
from appliance.kernels.triton_rms_norm import rms_norm
from appliance.kernels.triton_rope import rope


class TritonBackend:
    """`appliance.kernels.backend.Backend` of an NVIDIA card, or of Triton's interpreter with its tensors on the CPU."""

    name = "cuda"
    splits_phases = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        return rms_norm(x, weight, eps, residual)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:
        rope(x, cos, sin, norm, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        return gelu_and_mul(x)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, rows: StateRows
    ) -> Tensor:
        return gated_delta_rule(q, k, v, decay, beta, states, rows)

    def attention(
        self,
        layout: PagedLayout,
        slot_mapping: Tensor,
        query_start_loc: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        num_decode: int,
    ) -> TritonAttention:
        return TritonAttention(layout, slot_mapping, query_start_loc, seq_lens, block_tables, num_decode)
