"""One set of codes, zero points and scales in every container: the same weights to the bit, the same greedy answers.

The scales have few bits, so that GGUF's fp16 minimum (-scale * zero point) is exact too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.formats.gguf_metadata import hugging_face_name
from tests.engine.test_core import ask
from tests.quant.awq_writers import awq_config, gemm
from tests.quant.compressed_tensors_writer import compressed_config, compressed_tensors, group
from tests.quant.gguf_writer import LAYERS, SMALL, VOCAB, interleave, weights, write_gguf
from tests.quant.writers import exact_weight, gptq_config, gptq_tensors, pack

GROUP_SIZE = 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SMALL.hidden,
    "intermediate_size": SMALL.intermediate,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": SMALL.heads,
    "num_key_value_heads": SMALL.kv_heads,
    "head_dim": SMALL.head_dim,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": True,
}
"""What `write_gguf` says of the same model."""


@dataclass(frozen=True)
class Integers:
    """codes [K, N], zeros [G, N], scales [G, N] fp16 of 5 bits: 16 to 31 times 2**-10."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor

    @classmethod
    def random(cls, rows: int, columns: int, seed: int) -> Integers:
        generator = torch.Generator().manual_seed(seed)
        groups = (rows // GROUP_SIZE, columns)
        return cls(
            torch.randint(0, 16, (rows, columns), generator=generator),
            torch.randint(4, 12, groups, generator=generator),
            (torch.randint(16, 32, groups, generator=generator) / 1024).half(),
        )

    def exact(self) -> Tensor:
        """[N, K] float32."""
        order = torch.arange(self.codes.shape[0]) // GROUP_SIZE
        return exact_weight(self.codes, self.zeros, self.scales, order).float()


@dataclass(frozen=True)
class Model:
    """Quantised layers, and norms and embedding in float32, by Hugging Face's names."""

    layers: dict[str, Integers]
    plain: dict[str, Tensor]


@pytest.fixture(scope="module")
def model() -> Model:
    layers, plain = {}, {}
    for seed, (name, tensor) in enumerate(weights().items()):
        own = hugging_face_name(name)
        if tensor.ndim == 2 and name.startswith("blk."):
            layers[own.removesuffix(".weight")] = Integers.random(tensor.shape[1], tensor.shape[0], seed)
        else:
            plain[own] = torch.from_numpy(tensor)
    return Model(layers, plain)


def write_folder(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, object]) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    return folder


def gptq(model: Model, folder: Path) -> Path:
    tensors = dict(model.plain)
    for name, it in model.layers.items():
        order = torch.arange(it.codes.shape[0]) // GROUP_SIZE
        tensors |= gptq_tensors(it.codes, pack(it.zeros, 1), it.scales, order, name)
    return write_folder(folder / "gptq", tensors, gptq_config(GROUP_SIZE, checkpoint_format="gptq_v2"))


def awq(model: Model, folder: Path) -> Path:
    tensors = dict(model.plain)
    for name, it in model.layers.items():
        tensors |= gemm(name, it.codes, it.zeros, it.scales)
    return write_folder(folder / "awq", tensors, awq_config(GROUP_SIZE, version="gemm"))


def gguf_q4_1(model: Model, folder: Path) -> Path:
    tensors, kinds = dict[str, np.ndarray](), {}
    heads = {"attn_q": SMALL.heads, "attn_k": SMALL.kv_heads}
    for name, tensor in weights().items():
        layer = model.layers.get(hugging_face_name(name).removesuffix(".weight"))
        if layer is None:
            tensors[name] = tensor
            continue
        columns = layer.codes.shape[1]
        codes = layer.codes.t().reshape(columns, -1, 2, GROUP_SIZE // 2).numpy().astype(np.uint8)
        halves = torch.stack([layer.scales, -layer.scales * layer.zeros], -1).half().transpose(0, 1).contiguous()
        blocks = np.concatenate([halves.numpy().view(np.uint8), codes[:, :, 0] | codes[:, :, 1] << 4], -1)
        part = name.split(".")[2]
        rows = blocks.reshape(columns, -1)
        tensors[name], kinds[name] = interleave(rows, heads[part]) if part in heads else rows, Kind.Q4_1
    return write_gguf(folder / "model.gguf", tensors, kinds)


def compressed(model: Model, folder: Path) -> Path:
    tensors = dict(model.plain)
    for name, it in model.layers.items():
        tensors |= compressed_tensors(it.codes, it.zeros, it.scales, 4, module=name)
    config = compressed_config(group(4, GROUP_SIZE, symmetric=False))
    return write_folder(folder / "compressed_tensors", tensors, config)


CONTAINERS: list[Callable[[Model, Path], Path]] = [gptq, awq, compressed, gguf_q4_1]


@pytest.mark.parametrize("write", CONTAINERS)
def test_weights_are_equal_to_the_bit(write: Callable[[Model, Path], Path], model: Model, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(model, tmp_path))
    assert checkpoint.report.bits == 4
    assert checkpoint.report.group_size == GROUP_SIZE
    assert checkpoint.report.warnings == ()
    for name, integers in model.layers.items():
        found = checkpoint.tensor(f"{name}.weight")
        assert torch.equal(found.view(torch.int32), integers.exact().view(torch.int32)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_answers_are_equal(model: Model, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 too: every container becomes the same packed layers."""
    prompts = [[5, 7, 11], list(range(3, 35)), [39] * 17]
    answers = []
    for write in CONTAINERS:
        config = EngineConfig(str(write(model, tmp_path)), dtype=dtype, num_kv_blocks=32, num_threads=1)
        answers.append(ask(EngineCore.load(config), prompts))
    assert len({tuple(answer) for answer in answers[0]}) == len(prompts)
    assert all(answer == answers[0] for answer in answers)
