"""Patterns over module names: what matches, and that no pattern takes time or memory without end."""

from __future__ import annotations

import time

import pytest

from appliance.errors import CheckpointError
from appliance.quant.module_patterns import ModulePattern

MODULE = "model.layers.18.mlp.gate_proj"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r"model\.layers\.18", True),
        (r".*\.18\..*gate.*", True),
        (r".*\.(?:17|18)\.", True),
        (r".*\.\d{1,3}\.", True),
        (r"layers", False),
        (r"model\.layers\.18$", False),
    ],
)
def test_a_pattern_matches_from_the_start_of_the_name_on(pattern: str, matches: bool) -> None:
    assert ModulePattern("config.json", pattern).matches(MODULE) is matches


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", r"config\.json: '\(' is not a regular expression"),
        ("(" * 5000 + ")" * 5000, "is not a regular expression"),
        ("(" * 9000, "is not a regular expression"),
        ("a{99999999999}", r"has 14 characters and repeats up to 1e\+11 times"),
        ("(((a{1000}){1000}){1000}){1000}", r"repeats up to 1e\+12 times"),
        ("((a{1000,}){500,2000})", "has 22 characters and repeats up to"),
        ("a{999999999}" * 500, "repeats up to inf times"),
        ("|".join(map(str, range(10_000))), "has 48889 characters"),
        ("(a|aa)+$", "takes more than 0.5 seconds to match aaaa"),
        ("(?:a|aa)+c?$", "takes more than 0.5 seconds"),
        ("(.*?a){25}[xy]", "takes more than 0.5 seconds"),
        ("(?R)", "takes more than 0.5 seconds"),
    ],
)
def test_a_pattern_that_is_none_or_takes_too_much_is_refused_in_time(pattern: str, said: str) -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=said):
        ModulePattern("config.json", pattern).matches("a" * 60 + ".b")
    assert time.monotonic() - started < 20
