"""Models that can be quantised, and what an older transformers is told about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig

from appliance.errors import UsageError
from appliance.models.config_fields import ConfigFields
from appliance.models.rope_config import read_rope
from appliance.quantize.source import older_config, older_tokenizer_config, open_source
from tests.models.tiny import save_tiny
from tests.quantize.tiny_source import save_tiny_source

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_layers_of_the_blocks_are_quantised_and_nothing_else(tmp_path: Path) -> None:
    source = open_source(str(save_tiny_source(tmp_path)))
    assert len(source.shapes) == 2 * 7
    assert source.shapes["model.layers.1.self_attn.k_proj"] == (64, 128)
    assert source.shapes["model.layers.1.mlp.down_proj"] == (128, 192)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, is_quantized=True)
    with pytest.raises(UsageError, match=r"is quantised already \(GPTQ 4-bit, group 32"):
        open_source(str(tmp_path))


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(UsageError, match=r"is a \.gguf file, whose weights are rounded already: give the folder"):
        open_source(str(file))


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100000.0}, LLAMA3])
def test_the_older_config_means_the_same(rope: dict[str, Any]) -> None:
    newer = {"rope_parameters": rope, "dtype": "bfloat16", "hidden_size": 64, "auto_map": {"AutoModel": "evil.py"}}
    older = older_config(newer)
    assert older["rope_theta"] == rope["rope_theta"], "4.51 knows the base frequency by this key alone"
    assert older["torch_dtype"] == "bfloat16"
    assert not {"rope_parameters", "dtype", "auto_map"} & older.keys()
    assert read_rope(ConfigFields(older), 32768, 64) == read_rope(ConfigFields(newer), 32768, 64)
    known: Any = LlamaConfig(**older).rope_parameters
    assert {**rope, **known} == known, "transformers 5 reads it too"


def test_an_original_context_beside_the_rule_goes_into_it() -> None:
    rope = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    older = older_config({"rope_parameters": rope, "original_max_position_embeddings": 8192})
    assert older["rope_scaling"]["original_max_position_embeddings"] == 8192


def test_a_tokenizer_of_transformers_5_gets_a_class_that_both_know(tmp_path: Path) -> None:
    newer = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<pad>"], "auto_map": {}}
    assert older_tokenizer_config(newer) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<pad>"],
    }
    kept = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image": "<img>"}}
    assert older_tokenizer_config(kept) == kept
    save_tiny_source(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("hello")["input_ids"]
