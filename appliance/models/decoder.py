"""The decoder that all served architectures are instances of: RMSNorm, attention or a gated delta layer, RMSNorm, gated
MLP or a mixture of them; `ModelConfig` says which, and which biases, norms, windows, scales and caps.

Tensors: model.embed_tokens, model.layers.N.{input_layernorm, self_attn, linear_attn, attention_output_norm,
post_attention_layernorm, mlp.{gate,up,down}_proj, mlp_output_norm}, model.norm, lm_head (absent when tied); those of
self_attn are in self_attention.py, of linear_attn in gated_delta.py, of mixtures in experts.py. A checkpoint may hold
mlp.gate_up_proj as one layer, and have names of its own (tensor_names).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.backend import Backend
from appliance.kernels.spec import LinearKernel
from appliance.models.config import ModelConfig
from appliance.models.gated_delta import GatedDelta
from appliance.models.mixture import Mixture
from appliance.models.mlp import Mlp
from appliance.models.model_step import ModelStep
from appliance.models.rope import RotaryTable
from appliance.models.rope_config import RopeConfig
from appliance.models.self_attention import SelfAttention
from appliance.models.weights import WeightReader


class DecoderLayer:
    """One block of the residual stream, T rows, decodes first."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        backend: Backend,
        index: int,
        mixer: SelfAttention | GatedDelta,
    ) -> None:
        """index: of the layer; mixer: what mixes a row with those before it."""
        prefix = f"model.layers.{index}"
        self.backend = backend
        self.mixer = mixer
        self.eps = config.rms_norm_eps

        def norm(name: str) -> Tensor:
            return weights.norm(f"{prefix}.{name}.weight", config.hidden_size, config.norms_add_one)

        self.input_norm, self.post_attention_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.attention_output_norm, self.mlp_output_norm = (
            norm(f"{part}_output_norm") if config.has_output_norms else None for part in ("attention", "mlp")
        )
        hidden, mixture = config.hidden_size, config.mixtures[index]
        self.mlp: Mlp | Mixture
        if mixture is None:
            self.mlp = Mlp(
                weights,
                backend,
                f"{prefix}.mlp",
                hidden,
                config.intermediate_size,
                has_bias=config.mlp_bias,
                activation=config.activation,
                multiplier=config.residual_multiplier,
            )
        else:
            self.mlp = Mixture(mixture, weights, backend, prefix, hidden)

    def __call__(
        self, x: Tensor, delta: Tensor | None, angles: Sequence[tuple[Tensor, Tensor]], step: ModelStep
    ) -> Tensor:
        """What this block adds to x [T, hidden_size], after adding to x, in place, what the block before left to add.

        So that a device may add and norm in one pass. delta: None in the first block. angles: cos and sin of each of
        the model's rotary embeddings.
        """
        if delta is None:
            normed = self.backend.rms_norm(x, self.input_norm, self.eps)
        else:
            normed = self.backend.rms_norm(delta, self.input_norm, self.eps, x)
        mixed = self.mixer(normed, angles, step)
        if self.attention_output_norm is not None:
            mixed = self.backend.rms_norm(mixed, self.attention_output_norm, self.eps)
        normed = self.backend.rms_norm(mixed, self.post_attention_norm, self.eps, x)
        delta = self.mlp(normed, step.num_decode)
        if self.mlp_output_norm is not None:
            delta = self.backend.rms_norm(delta, self.mlp_output_norm, self.eps)
        return delta


def read_layer(config: ModelConfig, weights: WeightReader, backend: Backend, index: int) -> DecoderLayer:
    """Layer `index` with the mixer that `config` gives it."""
    mixer: SelfAttention | GatedDelta
    if index in config.recurrent_layers:
        assert config.gated_delta is not None
        part = config.recurrent_layers.index(index)
        mixer = GatedDelta(config, config.gated_delta, weights, backend, index, part)
    else:
        rope = config.ropes[index]
        rotary_index = None if rope is None else _distinct_ropes(config).index(rope)
        groups = enumerate(config.paged_groups)
        place = next((group, layers.layers.index(index)) for group, layers in groups if index in layers.layers)
        mixer = SelfAttention(config, weights, backend, index, rotary_index, place)
    return DecoderLayer(config, weights, backend, index, mixer)


def _distinct_ropes(config: ModelConfig) -> list[RopeConfig]:
    """In the order of a step's angles."""
    return [rope for rope in dict.fromkeys(config.ropes) if rope is not None]


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
        for index in range(config.num_layers):
            self.layers.append(read_layer(config, weights, backend, index))
            progress((index + 1) / config.num_layers)
        self.norm = weights.norm("model.norm.weight", config.hidden_size, config.norms_add_one)
        self.lm_head: LinearKernel = weights.lm_head(self.embed, config.tie_word_embeddings)
        # The table of positions is small beside a layer; the context is decided after the weights are in.
        dtype = weights.target.dtype
        self.rotaries = [
            RotaryTable(rope, config.head_dim, config.max_position, dtype, backend.device)
            for rope in _distinct_ropes(config)
        ]

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, positions: Tensor, step: ModelStep, rows: Tensor) -> Tensor:
        """Normed hidden states [R, hidden_size] of `rows` [R]; keys and values of all T rows are written, their
        requests' recurrent states carried on.

        input_ids, positions: [T] int64.
        """
        angles = [rotary.at(positions) for rotary in self.rotaries]
        x = F.embedding(input_ids, self.embed)
        if self.embedding_multiplier != 1.0:
            x.mul_(self.embedding_multiplier)
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(x, delta, angles, step)
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
