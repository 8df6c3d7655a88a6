"""A whole model in compressed-tensors, several widths and orders in one: it answers as transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from appliance import LLM, SamplingParams
from tests.appliance.tiny_model import EXACT
from tests.appliance.tokenizer_files import byte_level_bpe, save_byte_level_bpe
from tests.models.tiny import save_tiny_llama
from tests.quant.compressed_tensors_writer import compressed_config, compressed_tensors, group
from tests.quant.writers import exact_weight

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = ["hello world", "The sea is wide", "0123456789"]
# Last part of the name -> bits, group size (None: one group), symmetric. All others: 4, 32, False.
SCHEMES: dict[str, tuple[int, int | None, bool]] = {"o_proj": (8, None, True), "down_proj": (3, 32, False)}


def rounded(weight: Tensor, bits: int, size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zero points [G, N], fp16 scales [G, N] of weight [K, N]."""
    groups = weight.reshape(-1, size, weight.shape[1])
    bound = groups.abs().amax(1)
    scales = (2 * bound / ((1 << bits) - 1)).half()
    shift = 0 if symmetric else torch.arange(bound.shape[1]) % 3 - 1
    zeros = torch.full(bound.shape, 1 << (bits - 1)) + shift
    codes = (groups / scales.unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, (1 << bits) - 1)
    return codes.flatten(0, 1).long(), zeros.long(), scales


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The folder, and transformers' model of the weights that it stands for."""
    folder = tmp_path_factory.mktemp("model")
    save_byte_level_bpe(folder)
    tokenizer = byte_level_bpe()
    model = save_tiny_llama(
        folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=tokenizer.token_to_id("<|im_end|>")
    )
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        bits, group_size, symmetric = SCHEMES.get(name.rpartition(".")[2], (4, 32, False))
        rows = module.in_features
        order = torch.arange(rows) // (group_size or rows)
        codes, zeros, scales = rounded(module.weight.detach().t(), bits, group_size or rows, symmetric)
        if name.endswith("gate_proj"):
            order = order[torch.randperm(rows)]
        with torch.no_grad():
            module.weight.copy_(exact_weight(codes, zeros, scales, order))
        del tensors[f"{name}.weight"]
        tensors |= compressed_tensors(
            codes,
            None if symmetric else zeros,
            scales,
            bits,
            order=order if name.endswith("gate_proj") else None,
            module=name,
        )
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = compressed_config(
        group(8, None, "re:.*o_proj$"),
        group(3, 32, "re:.*down_proj$", symmetric=False),
        group(4, 32, symmetric=False),
        ignore=["lm_head"],
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def test_greedy_answers_are_those_of_transformers(quantized: tuple[Path, PreTrainedModel]) -> None:
    folder, model = quantized
    for output in LLM(folder, **EXACT).generate(PROMPTS, GREEDY):
        ids = torch.tensor([output.prompt_token_ids])
        for _ in range(NUM_TOKENS):
            logits = model(ids).logits[0, -1]
            ids = torch.cat([ids, logits.argmax().view(1, 1)], 1)
        assert output.outputs[0].token_ids == ids[0, -NUM_TOKENS:].tolist()


def test_it_runs_in_bfloat16(quantized: tuple[Path, PreTrainedModel]) -> None:
    llm = LLM(quantized[0], **{**EXACT, "dtype": "bfloat16"})
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)] == [NUM_TOKENS] * 3
