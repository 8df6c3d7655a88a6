"""The decoder that all served architectures are instances of: RMSNorm, grouped-query attention with rotary embedding,
RMSNorm, SwiGLU or a mixture of them; `ModelConfig` says which biases, norms and windows.

Tensors (Hugging Face names): model.embed_tokens, model.layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj,
self_attn.{q,k}_norm, post_attention_layernorm, mlp.{gate,up,down}_proj}, model.norm, lm_head (absent when tied);
those of mixtures are in experts.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.backend import Attention, Backend
from appliance.kernels.spec import LinearKernel
from appliance.models.config import ModelConfig
from appliance.models.mixture import Mixture
from appliance.models.mixture_config import MixtureConfig
from appliance.models.mlp import Mlp
from appliance.models.rope import RotaryTable
from appliance.models.weights import FusedLinear, WeightReader


class DecoderLayer:
    """One block of the residual stream, T rows, decodes first."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: Backend,
        prefix: str,
        window: int | None,
        mixture: MixtureConfig | None,
    ) -> None:
        """window: how many positions a token attends to, None for all. mixture: what stands for the MLP, if any."""
        self.backend = backend
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.eps = config.rms_norm_eps
        self.window = window
        self.input_norm = weights.norm(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.post_attention_norm = weights.norm(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, attention = config.hidden_size, f"{prefix}.self_attn"
        self.qkv: FusedLinear = weights.fused(
            attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias
        )
        self.qk_norm: Tensor | None = None
        if config.qk_norm:
            q_norm, k_norm = (weights.norm(f"{attention}.{name}_norm.weight", config.head_dim) for name in ("q", "k"))
            # [heads of q and k, head_dim]: the two are normed and turned as one.
            self.qk_norm = torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])
        self.output = weights.fused(attention, {"o_proj": hidden}, q, config.output_bias)
        self.mlp: Mlp | Mixture
        if mixture is None:
            self.mlp = Mlp(weights, backend, f"{prefix}.mlp", hidden, config.intermediate_size, config.mlp_bias)
        else:
            self.mlp = Mixture(mixture, weights, backend, prefix, hidden)

    def __call__(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, attention: Attention, cache: Tensor
    ) -> Tensor:
        """What this block adds to x [T, hidden_size], after adding to x, in place, what the block before left to add.

        So that a device may add and norm in one pass. delta: None in the first block.
        """
        num_decode = attention.num_decode
        if delta is None:
            normed = self.backend.rms_norm(x, self.input_norm, self.eps)
        else:
            normed = self.backend.rms_norm(delta, self.input_norm, self.eps, x)
        qkv = self.qkv(normed, num_decode).view(x.shape[0], -1, self.head_dim)
        self.backend.rope(qkv[:, : self.num_heads + self.num_kv_heads], cos, sin, self.qk_norm, self.eps)
        attention.write(cache, qkv[:, self.num_heads :])
        attended = attention.attend(cache, qkv[:, : self.num_heads], self.window)
        normed = self.backend.rms_norm(self.output(attended, num_decode), self.post_attention_norm, self.eps, x)
        return self.mlp(normed, num_decode)


class DecoderModel:
    """Token ids to hidden states out of a paged cache, and those to logits. Built by reading one module at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: Backend,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.embed = weights.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers: list[DecoderLayer] = []
        for index, (window, mixture) in enumerate(zip(config.windows, config.mixtures, strict=True)):
            self.layers.append(DecoderLayer(config, weights, backend, f"model.layers.{index}", window, mixture))
            progress((index + 1) / config.num_layers)
        self.norm = weights.norm("model.norm.weight", config.hidden_size)
        self.lm_head: LinearKernel = weights.lm_head(self.embed, config.tie_word_embeddings)
        # The table of positions is small beside a layer; the context is decided after the weights are in.
        dtype = weights.target.dtype
        self.rotary = RotaryTable(config.rope, config.head_dim, config.max_position, dtype, backend.device)

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, positions: Tensor, attention: Attention, cache: Tensor, rows: Tensor) -> Tensor:
        """Normed hidden states [R, hidden_size] of `rows` [R]; keys and values of all T rows are written.

        input_ids, positions: [T] int64; cache: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim].
        """
        cos, sin = self.rotary.at(positions)
        x = F.embedding(input_ids, self.embed)
        delta: Tensor | None = None
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            delta = layer(x, delta, cos, sin, attention, layer_cache)
        assert delta is not None, "a model has layers"
        last, residual = delta.index_select(0, rows), x.index_select(0, rows)
        return self.backend.rms_norm(last, self.norm, self.config.rms_norm_eps, residual)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of hidden states [R, hidden_size]."""
        return self.lm_head(hidden)
