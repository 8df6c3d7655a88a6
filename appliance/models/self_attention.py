"""Grouped-query attention with rotary embedding over a paged cache, one layer's.

Tensors: prefix.{q,k,v,o}_proj, prefix.{q,k}_norm. A checkpoint may hold prefix.qkv_proj as one layer. Of gated
attention q_proj has for each head its q, then its gate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from appliance.kernels.backend import Backend
from appliance.models.config import ModelConfig
from appliance.models.model_step import ModelStep
from appliance.models.rope import head_order
from appliance.models.weights import FusedLinear, WeightReader


class SelfAttention:
    """Mixes rows [T, hidden_size] of a step, decodes first, with what their requests hold in the cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: Backend,
        index: int,
        rotary_index: int | None,
        place: tuple[int, int],
    ) -> None:
        """index: of the layer; rotary_index: which of a step's angles turn its heads, None for none; place: its paged
        group, whose block tables it has, and the part of the cache it keeps its KV in.
        """
        prefix = f"model.layers.{index}.self_attn"
        self.backend = backend
        self.rotary_index = rotary_index
        self.group, self.part = place
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.num_gates = config.num_heads if config.is_attention_gated else 0
        self.window = config.paged_groups[self.group].window
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rope = config.ropes[index]
        assert rope is not None or not config.qk_norm, "heads are normed as they are turned"
        order = None if rope is None else head_order(rope, config.head_dim)
        orders = {} if order is None else {"q_proj": order, "k_proj": order}
        if config.is_attention_gated:
            orders["q_proj"] = _gates_first(config, order)
        self.qkv: FusedLinear = weights.fused(
            prefix,
            {"q_proj": 2 * q if config.is_attention_gated else q, "k_proj": kv, "v_proj": kv},
            config.hidden_size,
            config.qkv_bias,
            whole="qkv_proj",
            whole_order=_by_kv_head(config) if config.is_qkv_by_kv_head else None,
            head_orders=orders,
        )
        self.qk_norm: Tensor | None = None
        if config.qk_norm:
            q_norm, k_norm = (
                weights.norm(f"{prefix}.{name}_norm.weight", config.head_dim, config.norms_add_one) for name in "qk"
            )
            # [heads of q and k, head_dim]: the two are normed and turned as one.
            qk_norm = torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])
            self.qk_norm = qk_norm if order is None else qk_norm[:, order.to(qk_norm.device)].contiguous()
        self.output = weights.fused(
            prefix, {"o_proj": config.hidden_size}, q, config.output_bias, multiplier=config.residual_multiplier
        )

    def __call__(self, x: Tensor, angles: Sequence[tuple[Tensor, Tensor]], step: ModelStep) -> Tensor:
        attention, cache = step.attentions[self.group], step.cache[self.part]
        heads = self.qkv(x, step.num_decode).view(x.shape[0], -1, self.head_dim)
        qkv = heads[:, self.num_gates :] if self.num_gates else heads
        if self.rotary_index is not None:
            cos, sin = angles[self.rotary_index]
            self.backend.rope(qkv[:, : self.num_heads + self.num_kv_heads], cos, sin, self.qk_norm, self.eps)
        attention.write(cache, qkv[:, self.num_heads :])
        attended = attention.attend(cache, qkv[:, : self.num_heads], self.window, self.scale, self.soft_cap)
        if self.num_gates:
            attended = attended * heads[:, : self.num_gates].flatten(1).sigmoid()
        return self.output(attended, step.num_decode)


def _by_kv_head(config: ModelConfig) -> Tensor:
    """[(heads + 2 * kv heads) * head_dim]: which output of a layer laid out kv head by kv head each of q, k, v is."""
    group = config.num_heads // config.num_kv_heads
    rows = torch.arange((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    rows = rows.view(config.num_kv_heads, group + 2, config.head_dim)
    return torch.cat([rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()])


def _gates_first(config: ModelConfig, order: Tensor | None) -> Tensor:
    """[2 * heads * head_dim]: which output of q_proj each gate, then each q is. order: of a head's dimensions of q."""
    rows = torch.arange(2 * config.num_heads * config.head_dim).view(config.num_heads, 2, config.head_dim)
    q = rows[:, 0] if order is None else rows[:, 0, order]
    return torch.cat([rows[:, 1].flatten(), q.flatten()])
