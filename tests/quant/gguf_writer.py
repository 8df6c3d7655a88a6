"""A small GGUF file of a Llama-like model, written with the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Array = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]
VOCAB, LAYERS = 40, 2


@dataclass(frozen=True)
class Shape:
    hidden: int = 64
    intermediate: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16


SMALL = Shape()
LARGE = Shape(hidden=256, intermediate=512, heads=8, kv_heads=2, head_dim=32)
"""Fit for blocks of 256."""
# Where a block of 256 keeps its fp16 scales, and of what size they make weights of about 0.1.
_HALVES = {
    Kind.Q2_K: ((80, 5e-3), (82, 7e-3)),
    Kind.Q3_K: ((108, 1.5e-3),),
    Kind.Q4_K: ((0, 4e-4), (2, 3e-3)),
    Kind.Q5_K: ((0, 2e-4), (2, 3e-3)),
    Kind.Q6_K: ((208, 7e-5),),
}


def weights(seed: int = 0, shape: Shape = SMALL) -> dict[str, Array]:
    """Float weights under GGUF names, q and k in Hugging Face's row order, without output.weight (tied)."""
    generator = np.random.default_rng(seed)
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(*shape: int) -> Array:
        return generator.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": matrix(VOCAB, hidden), "output_norm.weight": matrix(hidden)}
    for layer in range(LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": matrix(hidden),
            f"blk.{layer}.attn_q.weight": matrix(q, hidden),
            f"blk.{layer}.attn_k.weight": matrix(kv, hidden),
            f"blk.{layer}.attn_v.weight": matrix(kv, hidden),
            f"blk.{layer}.attn_output.weight": matrix(hidden, q),
            f"blk.{layer}.ffn_norm.weight": matrix(hidden),
            f"blk.{layer}.ffn_gate.weight": matrix(shape.intermediate, hidden),
            f"blk.{layer}.ffn_up.weight": matrix(shape.intermediate, hidden),
            f"blk.{layer}.ffn_down.weight": matrix(hidden, shape.intermediate),
        }
    return tensors


def mixture(tensors: dict[str, Any], layer: int, experts: int = 8, size: int = 32, has_shared: bool = False) -> None:
    """Puts experts in the place of a layer's MLP, which becomes the shared one or goes."""
    generator = np.random.default_rng(layer)

    def matrix(*shape: int) -> Array:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.3)

    stem = f"blk.{layer}.ffn"
    for part, shape in (("gate", (size, SMALL.hidden)), ("up", (size, SMALL.hidden)), ("down", (SMALL.hidden, size))):
        dense = tensors.pop(f"{stem}_{part}.weight")
        if has_shared:
            tensors[f"{stem}_{part}_shexp.weight"] = dense
        tensors[f"{stem}_{part}_exps.weight"] = matrix(experts, *shape)
    tensors[f"{stem}_gate_inp.weight"] = matrix(experts, SMALL.hidden)
    if has_shared:
        tensors[f"{stem}_gate_inp_shexp.weight"] = matrix(SMALL.hidden)


def random_blocks(shape: tuple[int, int], kind: Kind, seed: int) -> Blocks:
    """[N, bytes]: a matrix [N, K] of a type of blocks of 256, which the package does not write: random bits, tame
    scales."""
    generator = np.random.default_rng(seed)
    codes, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // codes, size), dtype=np.uint8)
    for start, scale in _HALVES[kind]:
        halves = (generator.uniform(0.5, 1.5, (*blocks.shape[:2], 1)) * scale).astype("<f2")
        blocks[:, :, start : start + 2] = halves.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def mixed(most: Kind, few: Kind) -> tuple[dict[str, Array | Blocks], dict[str, Kind]]:
    """Tensors of LARGE and their kinds: attn_v, ffn_down and the embedding of one type, other matrices of another."""
    tensors: dict[str, Array | Blocks] = {}
    kinds: dict[str, Kind] = {}
    for seed, (name, tensor) in enumerate(weights(shape=LARGE).items()):
        tensors[name] = tensor
        if tensor.ndim == 2:
            kinds[name] = few if any(part in name for part in ("attn_v", "ffn_down", "token_embd")) else most
            tensors[name] = random_blocks((tensor.shape[0], tensor.shape[1]), kinds[name], seed)
    return tensors, kinds


def interleave(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """What convert_hf_to_gguf.py does to q and k of a Llama: [heads, 2, half] rows become [heads, half, 2]."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    tensors: Mapping[str, Array | Blocks],
    kinds: Mapping[str, Kind],
    *,
    architecture: str = "llama",
    shape: Shape = SMALL,
    metadata: Mapping[str, int | float | str] | None = None,
    parts: int = 1,
) -> Path:
    """Writes `tensors`, each in its kind (absent: F32), blocks as they are; metadata: further or other values of the
    architecture; parts: how many files the model is said to be split into."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers: dict[str, int | float | str] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.freq_base": 50000.0,
        **(metadata or {}),
    }
    value_types = gguf.GGUFValueType
    types = {int: value_types.UINT32, float: value_types.FLOAT32, str: value_types.STRING}
    for key, value in numbers.items():
        writer.add_key_value(f"{architecture}.{key}", value, types[type(value)])
    writer.add_uint16("split.count", parts)
    writer.add_key_value("test.bytes", [1] * 8, value_types.ARRAY, sub_type=value_types.UINT8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in tensors.items():
        kind = kinds.get(name, Kind.F32)
        data = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(head_dim: int, theta: float, factor: float, original: int = 8192) -> Array:
    """[head_dim / 2]: rope_freqs.weight of a Llama 3.1 (factor 8) or 3.2 (32), from transformers' own frequencies."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = {"rope_type": "llama3", "rope_theta": theta, "original_max_position_embeddings": original, **scaling}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    factors: Array = (plain / scaled).float().numpy()
    return factors
