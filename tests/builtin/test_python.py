"""Models from Python, on the built-in one: what docs/python.md shows can be pasted and run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "python.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["LLM", "AsyncLLMEngine"])
def test_an_example_of_the_documentation_knows_the_capitals(
    folder: Path, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "Rome" in printed
