"""Write a 4-bit symmetric GPTQ checkpoint of a Hugging Face folder, rounded to nearest: for speed, not for quality.

    python -m benchmarks.to_gptq HF_FOLDER OUT

Every `*proj.weight` is quantised in groups of 64 along K; zero points are stored minus one, as the format's version 1
has it, so that AutoGPTQ, vLLM, Transformers and we read the same weights. One safetensors file in, one out.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS, GROUP_SIZE, PER_WORD = 4, 64, 8
ZERO = 8
"""The code that stands for 0."""


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """qweight [K/8, N] and qzeros [G, N/8] int32, scales [G, N] float16, g_idx [K] int32 of a weight [N, K]."""
    N, K = weight.shape
    groups = weight.float().view(N, K // GROUP_SIZE, GROUP_SIZE)
    scales = (groups.abs().amax(-1) / (ZERO - 0.5)).clamp(min=1e-6)  # [N, G]
    codes = ((groups / scales.unsqueeze(-1)).round() + ZERO).clamp(0, 2**BITS - 1).int().view(N, K)
    zeros = torch.full((K // GROUP_SIZE, N), ZERO - 1, dtype=torch.int32)
    return {
        "qweight": pack(codes.t().contiguous()),
        "qzeros": pack(zeros.t().contiguous()).t().contiguous(),
        "scales": scales.t().contiguous().half(),
        "g_idx": torch.arange(K, dtype=torch.int32) // GROUP_SIZE,
    }


def pack(codes: Tensor) -> Tensor:
    """[R, C] codes to [R/8, C] int32: code of row 8r + i in bits 4i of word r."""
    words = torch.zeros(codes.shape[0] // PER_WORD, codes.shape[1], dtype=torch.int32)
    for i in range(PER_WORD):
        words |= codes[i::PER_WORD] << (BITS * i)
    return words


def convert(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": value for part, value in quantize(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": GROUP_SIZE,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, out / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    convert(options.folder, options.out)


if __name__ == "__main__":
    main()
