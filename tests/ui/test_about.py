"""What the page tells about the model."""

from __future__ import annotations

import dataclasses

from appliance.client import EngineState
from appliance.model_details import SelfTest, Verdict
from appliance.ui.about import UNKNOWN, about_html
from tests.fake_client import DETAILS, FakeEngineClient


def test_format_kernels_refusals_and_verdict_are_told() -> None:
    text = about_html(FakeEngineClient(details=DETAILS))
    for part in ("GPTQ 4-bit, group 128, act-order", "passed: the weights", "2 of K=256 N=512", "not other: it needs"):
        assert part in text


def test_faults_are_told_and_names_of_a_file_are_no_markup() -> None:
    failed = SelfTest(Verdict.FAILED, "up is damaged", ("<b>up</b>\n\n: every code is 7",))
    text = about_html(FakeEngineClient(details=dataclasses.replace(DETAILS, self_test=failed)))
    assert "failed: up is damaged" in text
    assert "&lt;b&gt;up&lt;/b&gt; : every code is 7" in text
    assert "\n" not in text
    assert "hold &lt;words&gt; packed" in text


def test_nothing_is_told_before_the_model_is_loaded() -> None:
    assert about_html(FakeEngineClient(state=EngineState.LOADING, details=DETAILS)) == UNKNOWN
