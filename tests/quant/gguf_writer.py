"""A small GGUF file of a Llama-like model, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 40, 2
Array = npt.NDArray[np.float32]


def weights(seed: int = 0) -> dict[str, Array]:
    """Float weights under GGUF names, q and k in Hugging Face's row order, without output.weight (tied)."""
    generator = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return generator.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": matrix(HIDDEN),
            f"blk.{layer}.attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": matrix(HIDDEN),
            f"blk.{layer}.ffn_gate.weight": matrix(INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": matrix(INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return tensors


def interleave(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """What convert_hf_to_gguf.py does to q and k of a Llama: [heads, 2, half] rows become [heads, half, 2]."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    tensors: dict[str, Array],
    kinds: dict[str, gguf.GGMLQuantizationType],
    *,
    architecture: str = "llama",
    metadata: dict[str, int] | None = None,
    parts: int = 1,
) -> Path:
    """Writes `tensors`, each in its kind (absent: F32); metadata: further or other integers of the architecture;
    parts: how many files the model is said to be split into."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    } | (metadata or {})
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_uint16("split.count", parts)
    value_types = gguf.GGUFValueType
    writer.add_key_value("test.bytes", [1] * 8, value_types.ARRAY, sub_type=value_types.UINT8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in tensors.items():
        kind = kinds.get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
