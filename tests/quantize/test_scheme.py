"""What cannot be done is refused in a sentence that says what can."""

from __future__ import annotations

import pytest

from appliance.errors import UnsupportedModelError, UsageError
from appliance.quantize.scheme import Scheme

SMALL = {"model.layers.0.mlp.up_proj": (1536, 576), "model.layers.0.mlp.down_proj": (576, 1536)}


@pytest.mark.parametrize(
    ("method", "bits", "group_size", "sentence"),
    [
        ("gguf", 4, 64, "--method gguf is not known: use awq, gptq or rtn"),
        ("awq", 3, 64, "--bits 3 is not possible with --method awq: use 4"),
        ("gptq", 5, 64, "--bits 5 is not possible with --method gptq: use 2, 3, 4 or 8"),
        ("awq", 4, -1, "--group-size -1 is not possible with --method awq: use 16, 32, 64 or 128"),
        ("gptq", 4, 0, "--group-size 0 is not possible with --method gptq: use -1, 16, 32, 64 or 128"),
    ],
)
def test_a_scheme_no_package_can_do_is_refused(method: str, bits: int, group_size: int, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Scheme(method, bits, group_size)
    assert caught.value.message == sentence


@pytest.mark.parametrize(("method", "sizes"), [("awq", "16, 32 or 64"), ("gptq", "-1, 16, 32 or 64")])
def test_a_group_size_that_does_not_divide_the_inputs_names_those_that_do(method: str, sizes: str) -> None:
    with pytest.raises(UsageError) as caught:
        Scheme(method, 4, 128).check_shapes(SMALL)
    assert caught.value.message == (
        f"model.layers.0.mlp.up_proj has 576 inputs, which --group-size 128 does not divide: use --group-size {sizes}"
    )
    Scheme(method, 4, 64).check_shapes(SMALL)


def test_outputs_that_awq_cannot_clip_are_refused() -> None:
    with pytest.raises(UsageError, match="has 64 inputs and 96 outputs, --method awq takes multiples of 16 and 64"):
        Scheme("awq", 4, 32).check_shapes({"model.layers.0.mlp.up_proj": (96, 64)})
    Scheme("rtn", 4, 32).check_shapes({"model.layers.0.mlp.up_proj": (96, 64)})


def test_a_model_a_package_does_not_know_names_the_methods_that_do() -> None:
    with pytest.raises(UnsupportedModelError, match=r"of type qwen3, --method gptq takes .*: use --method awq or rtn"):
        Scheme("gptq", 4, 64).check_model("qwen3")
    with pytest.raises(UnsupportedModelError, match="no other method takes it"):
        Scheme("awq", 4, 64).check_model("gemma3")
