"""docs/formats.md says what the fixtures show."""

from __future__ import annotations

from tests.quant.format_table import documented, table


def test_the_documented_table_is_what_the_fixtures_give_and_nothing_in_it_is_wrong() -> None:
    found = table()
    assert documented() == found, "run: python -m tests.quant.format_table"
    assert "WRONG" not in found
    assert all("exact" in line or "which a warning counts" in line for line in found.splitlines()[2:])
