"""The decoder that all served architectures are instances of: RMSNorm, grouped-query attention with rotary embedding,
RMSNorm, SwiGLU; `ModelConfig` says which biases, norms and windows.

Tensors (Hugging Face names): model.embed_tokens, model.layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj,
self_attn.{q,k}_norm, post_attention_layernorm, mlp.{gate,up,down}_proj}, model.norm, lm_head (absent when tied).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.cpu_attention import CpuAttention
from appliance.kernels.spec import LinearKernel
from appliance.models.config import ModelConfig
from appliance.models.rope import RotaryTable, rotate
from appliance.models.weights import FusedLinear, WeightReader


class DecoderLayer:
    """One block. x [T, hidden_size] -> [T, hidden_size], decode rows first."""

    def __init__(self, config: ModelConfig, weights: WeightReader, prefix: str, window: int | None) -> None:
        """window: how many positions a token attends to, None for all."""
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.eps = config.rms_norm_eps
        self.window = window
        self.input_norm = weights.norm(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.post_attention_norm = weights.norm(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, intermediate = config.hidden_size, config.intermediate_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.qkv: FusedLinear = weights.fused(
            attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias
        )
        self.qk_norm: Tensor | None = None
        if config.qk_norm:
            norms = [weights.norm(f"{attention}.{name}_norm.weight", config.head_dim) for name in ("q", "k")]
            heads = torch.tensor([config.num_heads, config.num_kv_heads])
            self.qk_norm = torch.stack(norms).repeat_interleave(heads, 0)  # [heads of q and k, head_dim]
        self.output = weights.fused(attention, {"o_proj": hidden}, q, config.output_bias)
        self.gate_up = weights.fused(mlp, {"gate_proj": intermediate, "up_proj": intermediate}, hidden, config.mlp_bias)
        self.down = weights.fused(mlp, {"down_proj": hidden}, intermediate, config.mlp_bias)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: CpuAttention, cache: Tensor) -> Tensor:
        num_decode = attention.num_decode
        normed = F.rms_norm(x, (x.shape[1],), self.input_norm, self.eps)
        qkv = self.qkv(normed, num_decode).view(x.shape[0], -1, self.head_dim)
        turned = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is None:
            turned.copy_(rotate(turned, cos, sin))
        else:
            turned.copy_(rotate(F.rms_norm(turned, (self.head_dim,), None, self.eps) * self.qk_norm, cos, sin))
        attention.write(cache, qkv[:, self.num_heads :])
        attended = attention.attend(cache, qkv[:, : self.num_heads], self.window)
        x = x + self.output(attended, num_decode)
        normed = F.rms_norm(x, (x.shape[1],), self.post_attention_norm, self.eps)
        gate, up = self.gate_up(normed, num_decode).chunk(2, -1)
        return x + self.down(F.silu(gate) * up, num_decode)


class DecoderModel:
    """Token ids to logits out of a paged cache. Built by reading one module at a time from a checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        max_position: int,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self.config = config
        self.embed = weights.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers: list[DecoderLayer] = []
        for index, window in enumerate(config.windows):
            self.layers.append(DecoderLayer(config, weights, f"model.layers.{index}", window))
            progress((index + 1) / config.num_layers)
        self.norm = weights.norm("model.norm.weight", config.hidden_size)
        self.lm_head: LinearKernel = weights.lm_head(self.embed, config.tie_word_embeddings)
        self.rotary = RotaryTable(config.rope, config.head_dim, max_position, weights.target.dtype)

    @torch.inference_mode()
    def __call__(
        self, input_ids: Tensor, positions: Tensor, attention: CpuAttention, cache: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """Logits [R, vocab_size] of rows `logits_rows` [R].

        input_ids, positions: [T] int64; cache: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim].
        """
        cos, sin = self.rotary.at(positions)
        x = F.embedding(input_ids, self.embed)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, cos, sin, attention, layer_cache)
        x = F.rms_norm(x[logits_rows], (x.shape[1],), self.norm, self.config.rms_norm_eps)
        return self.lm_head(x)
