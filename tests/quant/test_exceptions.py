"""Modules that differ from the rest, in as few lines as say it."""

from __future__ import annotations

import pytest

from appliance.quant.exceptions import describe_module, exception_lines

USUAL = "4-bit group 128"
NAMES = ("self_attn.q_proj", "mlp.up_proj")


def settings(count: int, **changed: str) -> dict[str, str]:
    """Layers of two modules; `_3` changes layer 3, `_3_up` its up_proj."""
    found = {f"model.layers.{n}.{name}": changed.get(f"_{n}", USUAL) for n in range(count) for name in NAMES}
    found |= {f"model.layers.{key[1:-3]}.mlp.up_proj": text for key, text in changed.items() if key.endswith("_up")}
    return found


@pytest.mark.parametrize(
    ("modules", "lines"),
    [
        (settings(3), ()),
        (settings(3) | {"lm_head": "not quantised"}, ("lm_head not quantised",)),
        (settings(6, _1="x", _2="x", _5="x"), ("model.layers.1-2,5.* x",)),
        (settings(12, _2="x", _10="y"), ("model.layers.2.* x", "model.layers.10.* y")),
        (settings(3, _1_up="x"), ("model.layers.1.mlp.up_proj x",)),
        (settings(3, _0_up="x", _1_up="x", _2_up="x"), ("model.layers.*.mlp.up_proj x",)),
        (settings(3, _0_up="x", _1="x"), ("model.layers.0.mlp.up_proj x", "model.layers.1.* x")),
        ({"0.weight": "x", "9" * 5000: "x"}, ("*.weight x", f"{'9' * 5000} x")),
    ],
)
def test_layers_that_are_alike_share_a_line(modules: dict[str, str], lines: tuple[str, ...]) -> None:
    assert exception_lines(modules, USUAL) == lines


def test_many_kinds_are_counted_and_not_listed() -> None:
    lines = exception_lines({f"m{n}": "x" for n in range(50)}, USUAL)
    assert lines[19:] == ("m19 x", "and 30 more kinds of modules")


def test_a_single_group_is_described_as_the_usual_size_where_that_makes_one_group() -> None:
    assert describe_module(4, 576, 576, -1) == "4-bit one group per column"
    assert describe_module(4, 576, 576, 1024) == "4-bit group 1024"
    assert describe_module(4, 576, 576, 128) == "4-bit group 576"
    assert describe_module(8, 576, 32, 128) == "8-bit group 32"
