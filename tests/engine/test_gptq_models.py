"""GPTQ models of every width through `LLM`: the text that transformers gives on the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from appliance import LLM, SamplingParams
from tests.appliance.tiny_model import EXACT
from tests.appliance.tokenizer_files import byte_level_bpe, save_byte_level_bpe
from tests.engine.test_architectures import greedy
from tests.models.tiny import save_tiny

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def mixed(module: str) -> int:
    """Fused projections of different widths, a layer of its own width, a plain module, a quantised lm_head."""
    if module.endswith("layers.0.self_attn.v_proj"):
        return 0
    if module == "lm_head" or module.endswith("layers.0.mlp.up_proj"):
        return 8
    return 3 if ".layers.1." in module else 4


@pytest.mark.parametrize("bits", [2, 3, 4, 8, "mixed"])
def test_every_width_gives_transformers_greedy_text_in_float32_and_runs_in_bfloat16(
    tmp_path: Path, bits: int | str
) -> None:
    def bits_of(module: str) -> int:
        return mixed(module) if isinstance(bits, str) else bits if module != "lm_head" else 0

    save_byte_level_bpe(tmp_path)
    vocab_size = byte_level_bpe().get_vocab_size()
    model = save_tiny(tmp_path, is_quantized=True, bits_of=bits_of, vocab_size=vocab_size)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (5, 17, 40)]
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) == len(prompts)

    exact = LLM(tmp_path, **EXACT)
    answers = [output.outputs[0].token_ids for output in exact.generate(prompts, GREEDY)]
    assert answers == expected
    texts = [output.outputs[0].text for output in exact.generate(prompts, GREEDY)]
    assert texts == [byte_level_bpe().decode(answer) for answer in expected]

    rough = LLM(tmp_path, **{**EXACT, "dtype": "bfloat16"})
    assert [len(output.outputs[0].token_ids) for output in rough.generate(prompts, GREEDY)] == [NUM_TOKENS] * 3
