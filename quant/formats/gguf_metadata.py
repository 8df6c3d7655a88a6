"""GGUF metadata and tensor names in Hugging Face's terms. It knows keys and names, not tensor data.

Keys and names: the `gguf` package's constants.py; `<arch>.` stands for general.architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.formats.gguf_mixture import mixture_fields
from appliance.quant.formats.gguf_rope import rope_scaling

# Mistral files before Small 3.1 say llama.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""Architecture and model_type of config.json."""
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
EVERY_EXPERT = "*"
"""Stands for an expert's number in the name of a tensor that holds all of a layer."""
_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EVERY_EXPERT}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EVERY_EXPERT}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EVERY_EXPERT}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# A key whose meaning the configurations served cannot carry: serving without it would be wrong.
_TEMPERATURE = "attention.temperature_scale"


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises UnsupportedModelError naming others."""
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{suffix}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER:
            return f"model.layers.{int(parts[1])}.{_LAYER[parts[2]]}.{suffix}"
    raise UnsupportedModelError(
        f"GGUF tensor {name} has no place in the served architectures ({', '.join(ARCHITECTURES)}): use another model"
    )


def config_from_metadata(
    read: Callable[[str], Any], shapes: dict[str, tuple[int, ...]], rope_factors: Sequence[float] | None = None
) -> dict[str, Any]:
    """A config.json of the model. `read` gives a metadata value or None; shapes: GGUF tensor name -> [N, K];
    rope_factors: the values of tensor rope_freqs.weight, where there is one.

    Raises UnsupportedModelError for architectures and features not served, CheckpointError naming a missing key.
    """
    architecture = read("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the GGUF file's architecture is {architecture!r}, served are {', '.join(ARCHITECTURES)}: use another file"
        )

    if (read("split.count") or 1) != 1:
        raise UnsupportedModelError(
            f"the GGUF file is one of {read('split.count')} parts, only whole files are read: merge the parts first"
        )

    def optional(key: str) -> Any:
        return read(f"{architecture}.{key}")

    def integer(key: str) -> int:
        value = optional(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"GGUF metadata {architecture}.{key} is {value!r}, a positive integer was expected")
        return value

    if optional(_TEMPERATURE):
        raise UnsupportedModelError(
            f"the GGUF file says {architecture}.{_TEMPERATURE} {optional(_TEMPERATURE)!r}, attention of that kind is "
            "not served: use another model"
        )
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError("the GGUF file has no matrix token_embd.weight: download it again")
    heads = integer("attention.head_count")
    stated = optional("attention.key_length")
    head_dim = integer("attention.key_length") if stated else integer("embedding_length") // heads
    rotary = optional("rope.dimension_count")
    if rotary not in (None, head_dim):
        raise UnsupportedModelError(
            f"the GGUF file rotates {rotary} of {head_dim} head dimensions, only all are served: use another model"
        )
    mixture = mixture_fields(architecture, optional, shapes)
    class_name, model_type = _MIXTRAL if architecture == "llama" and mixture else ARCHITECTURES[architecture]
    theta = optional("rope.freq_base") or 10000.0
    if not isinstance(theta, int | float) or not theta > 0:
        raise CheckpointError(
            f"GGUF metadata {architecture}.rope.freq_base is {theta!r}, a positive number was expected"
        )
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": integer("embedding_length"),
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv") if optional("attention.head_count_kv") else heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": optional("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "max_position_embeddings": integer("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        **mixture,
    }
    if config["rms_norm_eps"] is None:
        raise CheckpointError(
            f"GGUF metadata {architecture}.attention.layer_norm_rms_epsilon is missing, a number was expected"
        )
    scaling = rope_scaling(lambda key: optional(f"rope.scaling.{key}"), rope_factors, theta, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if model_type == "mistral":
        config["sliding_window"] = None  # absent would mean the window of Mistral's first version
    return config
