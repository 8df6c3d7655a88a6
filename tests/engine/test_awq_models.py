"""AWQ and AutoRound models through `LLM`: the text that transformers gives on the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from appliance import LLM, SamplingParams
from tests.appliance.tiny_model import EXACT
from tests.appliance.tokenizer_files import byte_level_bpe, save_byte_level_bpe
from tests.engine.test_architectures import greedy
from tests.models.tiny import save_tiny_llama
from tests.quant.awq_writers import WRITERS, awq_config, exact, round_to_groups
from tests.quant.writers import gptq_tensors, gptqmodel_zero_words, pack

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
GROUP_SIZE = 32
GROUPS_OF_64 = "model.layers.1.mlp."


def gptq_version_1(module: str, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> dict[str, Tensor]:
    assert zeros is not None
    return gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, None, module)


def gptq_version_2(module: str, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> dict[str, Tensor]:
    assert zeros is not None
    return gptq_tensors(codes, pack(zeros, 1), scales, None, module)


AUTOROUND = {
    "auto_round:auto_gptq": gptq_version_1,
    "auto_round": gptq_version_2,
    "auto_round:auto_awq": WRITERS["gemm"],
}


def write(
    folder: Path, layout: str, config: dict[str, Any], is_plain: Callable[[str], bool] = lambda module: False
) -> PreTrainedModel:
    """A tiny Llama whose linear modules, but lm_head and those that are plain, are packed; transformers' own of the
    same weights, float32."""
    save_byte_level_bpe(folder)
    # gemv_fast packs 64 inputs at a time.
    model = save_tiny_llama(folder, vocab_size=byte_level_bpe().get_vocab_size(), intermediate_size=128)
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or is_plain(name):
            continue
        own_groups = "extra_config" in config and name.startswith(GROUPS_OF_64)
        codes, zeros, scales = round_to_groups(module.weight, 64 if own_groups else GROUP_SIZE)
        has_zeros = config.get("zero_point", True)
        if not has_zeros:
            zeros = torch.full_like(zeros, 8)
        with torch.no_grad():
            module.weight.copy_(exact(layout, codes, zeros, scales))
        del tensors[f"{name}.weight"]
        tensors |= (WRITERS | AUTOROUND)[layout](name, codes, zeros if has_zeros else None, scales)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return model


def assert_same_text(folder: Path, model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in (5, 17, 40)]
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    answers = [output.outputs[0] for output in LLM(folder, **EXACT).generate(prompts, GREEDY)]
    assert [answer.token_ids for answer in answers] == expected
    assert [answer.text for answer in answers] == [byte_level_bpe().decode(tokens) for tokens in expected]


@pytest.mark.parametrize("layout", WRITERS)
def test_every_awq_layout_gives_transformers_greedy_text(tmp_path: Path, layout: str) -> None:
    assert_same_text(tmp_path, write(tmp_path, layout, awq_config(GROUP_SIZE, version=layout)))


@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast"])
def test_awq_without_zero_points_gives_transformers_greedy_text(tmp_path: Path, layout: str) -> None:
    assert_same_text(tmp_path, write(tmp_path, layout, awq_config(GROUP_SIZE, version=layout, zero_point=False)))


@pytest.mark.parametrize("layout", WRITERS)
def test_modules_not_converted_run_beside_the_others(tmp_path: Path, layout: str) -> None:
    """One projection of a fused matmul, and a whole layer."""
    names = ["0.self_attn.k_proj", "0.mlp.gate_proj", "layers.1."]
    config = awq_config(GROUP_SIZE, version=layout, modules_to_not_convert=names)
    assert_same_text(tmp_path, write(tmp_path, layout, config, lambda module: any(name in module for name in names)))


@pytest.mark.parametrize("packing", AUTOROUND)
def test_every_autoround_packing_gives_transformers_greedy_text(tmp_path: Path, packing: str) -> None:
    """With a module left as it is and a layer in groups of its own."""
    plain = "model.layers.0.self_attn.v_proj"
    extra = {plain: {"bits": 16, "data_type": "float"}, f"{GROUPS_OF_64}.*": {"group_size": 64}}
    config = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": GROUP_SIZE}
    config |= {"sym": False, "data_type": "int", "extra_config": extra}
    assert_same_text(tmp_path, write(tmp_path, packing, config, lambda module: module == plain))
