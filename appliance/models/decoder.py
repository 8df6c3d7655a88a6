"""The decoder that all served architectures are instances of: RMSNorm, grouped-query attention with rotary embedding,
RMSNorm, gated MLP; `ModelConfig` says which biases, norms, windows, scales and caps.

Tensors: model.embed_tokens, model.layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj, self_attn.{q,k}_norm,
attention_output_norm, post_attention_layernorm, mlp.{gate,up,down}_proj, mlp_output_norm}, model.norm, lm_head (absent
when tied). A checkpoint may hold self_attn.qkv_proj and mlp.gate_up_proj as one layer each, and have names of its own
(tensor_names).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.backend import Attention, Backend
from appliance.kernels.spec import LinearKernel
from appliance.models.config import Activation, ModelConfig
from appliance.models.rope import RotaryTable, head_order
from appliance.models.weights import FusedLinear, WeightReader


class DecoderLayer:
    """One block of the residual stream, T rows, decodes first."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: Backend,
        index: int,
        rotary_index: int | None,
        window: int | None,
    ) -> None:
        """index: of the layer; rotary_index: which of a step's angles turn its heads, None for none; window: how many
        positions a token attends to, None for all.
        """
        prefix = f"model.layers.{index}"
        self.backend = backend
        self.rotary_index = rotary_index
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.eps = config.rms_norm_eps
        self.window = window
        self.attention_scale, self.attention_soft_cap = config.attention_scale, config.attention_soft_cap
        self.activate = backend.gelu_and_mul if config.activation is Activation.GELU else backend.silu_and_mul

        def norm(name: str, size: int = config.hidden_size) -> Tensor:
            return weights.norm(f"{prefix}.{name}.weight", size, config.norms_add_one)

        self.input_norm, self.post_attention_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.attention_output_norm, self.mlp_output_norm = (
            norm(f"{part}_output_norm") if config.has_output_norms else None for part in ("attention", "mlp")
        )
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, intermediate = config.hidden_size, config.intermediate_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        rope = config.ropes[index]
        assert rope is not None or not config.qk_norm, "heads are normed as they are turned"
        order = None if rope is None else head_order(rope, config.head_dim)
        self.qkv: FusedLinear = weights.fused(
            attention,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            hidden,
            config.qkv_bias,
            whole="qkv_proj",
            whole_order=_by_kv_head(config) if config.is_qkv_by_kv_head else None,
            head_orders={} if order is None else {"q_proj": order, "k_proj": order},
        )
        self.qk_norm: Tensor | None = None
        if config.qk_norm:
            q_norm, k_norm = (norm(f"self_attn.{name}_norm", config.head_dim) for name in ("q", "k"))
            # [heads of q and k, head_dim]: the two are normed and turned as one.
            qk_norm = torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])
            self.qk_norm = qk_norm if order is None else qk_norm[:, order.to(qk_norm.device)].contiguous()
        self.output = weights.fused(
            attention, {"o_proj": hidden}, q, config.output_bias, multiplier=config.residual_multiplier
        )
        gate_up = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up = weights.fused(mlp, gate_up, hidden, config.mlp_bias, whole="gate_up_proj")
        self.down = weights.fused(
            mlp, {"down_proj": hidden}, intermediate, config.mlp_bias, multiplier=config.residual_multiplier
        )

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        angles: Sequence[tuple[Tensor, Tensor]],
        attention: Attention,
        cache: Tensor,
    ) -> Tensor:
        """What this block adds to x [T, hidden_size], after adding to x, in place, what the block before left to add.

        So that a device may add and norm in one pass. delta: None in the first block. angles: cos and sin of each of
        the model's rotary embeddings.
        """
        num_decode = attention.num_decode
        if delta is None:
            normed = self.backend.rms_norm(x, self.input_norm, self.eps)
        else:
            normed = self.backend.rms_norm(delta, self.input_norm, self.eps, x)
        qkv = self.qkv(normed, num_decode).view(x.shape[0], -1, self.head_dim)
        if self.rotary_index is not None:
            cos, sin = angles[self.rotary_index]
            self.backend.rope(qkv[:, : self.num_heads + self.num_kv_heads], cos, sin, self.qk_norm, self.eps)
        attention.write(cache, qkv[:, self.num_heads :])
        q = qkv[:, : self.num_heads]
        attended = attention.attend(cache, q, self.window, self.attention_scale, self.attention_soft_cap)
        attended = self.output(attended, num_decode)
        if self.attention_output_norm is not None:
            attended = self.backend.rms_norm(attended, self.attention_output_norm, self.eps)
        normed = self.backend.rms_norm(attended, self.post_attention_norm, self.eps, x)
        delta = self.down(self.activate(self.gate_up(normed, num_decode)), num_decode)
        if self.mlp_output_norm is not None:
            delta = self.backend.rms_norm(delta, self.mlp_output_norm, self.eps)
        return delta


def _by_kv_head(config: ModelConfig) -> Tensor:
    """[(heads + 2 * kv heads) * head_dim]: which output of a layer laid out kv head by kv head each of q, k, v is."""
    group = config.num_heads // config.num_kv_heads
    rows = torch.arange((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    rows = rows.view(config.num_kv_heads, group + 2, config.head_dim)
    return torch.cat([rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()])


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
        # As the checkpoint's dtype has it: makers trained with the rounded number.
        self.embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=weights.target.dtype))
        self.layers: list[DecoderLayer] = []
        ropes = [rope for rope in dict.fromkeys(config.ropes) if rope is not None]
        places = {
            layer: (group, part)
            for group, layers in enumerate(config.paged_groups)
            for part, layer in enumerate(layers.layers)
        }
        self.places = [places[index] for index in range(config.num_layers)]
        """Of each layer: its group, whose block tables it has, and the part of the cache it keeps its KV in."""
        for index, (group, _) in enumerate(self.places):
            rope, window = config.ropes[index], config.paged_groups[group].window
            rotary_index = None if rope is None else ropes.index(rope)
            self.layers.append(DecoderLayer(config, weights, backend, index, rotary_index, window))
            progress((index + 1) / config.num_layers)
        self.norm = weights.norm("model.norm.weight", config.hidden_size, config.norms_add_one)
        self.lm_head: LinearKernel = weights.lm_head(self.embed, config.tie_word_embeddings)
        # The table of positions is small beside a layer; the context is decided after the weights are in.
        dtype = weights.target.dtype
        self.rotaries = [
            RotaryTable(rope, config.head_dim, config.max_position, dtype, backend.device) for rope in ropes
        ]

    @torch.inference_mode()
    def hidden(
        self, input_ids: Tensor, positions: Tensor, attentions: Sequence[Attention], cache: Tensor, rows: Tensor
    ) -> Tensor:
        """Normed hidden states [R, hidden_size] of `rows` [R]; keys and values of all T rows are written.

        input_ids, positions: [T] int64; attentions: one a group; cache: [layers of a group, 2, num_blocks,
        num_kv_heads, block_size, head_dim].
        """
        angles = [rotary.at(positions) for rotary in self.rotaries]
        x = F.embedding(input_ids, self.embed)
        if self.embedding_multiplier != 1.0:
            x.mul_(self.embedding_multiplier)
        delta: Tensor | None = None
        for layer, (group, part) in zip(self.layers, self.places, strict=True):
            delta = layer(x, delta, angles, attentions[group], cache[part])
        assert delta is not None, "a model has layers"
        last, residual = delta.index_select(0, rows), x.index_select(0, rows)
        return self.backend.rms_norm(last, self.norm, self.config.rms_norm_eps, residual)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of hidden states [R, hidden_size]; capped ones are float32."""
        logits = self.lm_head(hidden)
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        cap = self.config.logits_soft_cap
        return logits if cap is None else torch.tanh(logits.float() / cap).mul_(cap)
