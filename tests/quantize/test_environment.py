"""The packages' own environment: one list of packages, and a sentence for each way in which it cannot be had."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.errors import UsageError
from appliance.quantize import environment
from appliance.quantize.environment import REQUIREMENTS, quantizing_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make() -> Path:
    return quantizing_python(None, lambda what, fraction: None)


def test_the_packages_are_those_of_the_dependency_group() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert list(REQUIREMENTS) == groups["quantize"]


def test_an_environment_that_lacks_the_packages_is_refused() -> None:
    with pytest.raises(UsageError, match=r"should have auto-gptq 0\.7\.1 and autoawq 0\.2\.9 but has .*No package"):
        quantizing_python(Path(sys.executable), lambda what, fraction: None)


def test_a_python_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be run"):
        quantizing_python(tmp_path / "python", lambda what, fraction: None)


def test_another_python_than_the_packages_need_is_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(environment, "PYTHON", (3, 2))
    with pytest.raises(UsageError) as caught:
        make()
    found = "{}.{}".format(*sys.version_info[:2])
    assert f"need Python 3.2, this is Python {found} and no python3.2 is on the PATH" in caught.value.message
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_too_little_space_is_found_before_anything_is_made(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(UsageError, match=r"only 5 MiB are free on the disk of .*, the quantisers' environment needs"):
        make()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_an_index_that_is_not_reached_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """pip itself, in an environment really made, against a port where nothing listens."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "PYTHON", sys.version_info[:2])
    with pytest.raises(UsageError, match="the package index was not reached: check the network"):
        make()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_full_disk_and_other_failures_of_pip_are_told_apart() -> None:
    full = environment._error("Installing\nERROR: [Errno 28] No space left on device")
    assert "is full" in full.message
    other = environment._error("Collecting x\nERROR: No matching distribution found for x\n")
    assert "could not be made (ERROR: No matching distribution found for x)" in other.message
