"""What MODEL may be, and what is said where it is none of that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance import model_source
from appliance.errors import UsageError
from appliance.model_source import resolve_model


def resolve(model: Path) -> Path:
    return resolve_model(str(model), lambda what, fraction: None)


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The .gguf files that were converted, by a stand-in."""
    files: list[Path] = []

    def convert(gguf: Path, folder: Path, progress: object) -> None:
        files.append(gguf)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("APPLIANCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_source, "convert_in_subprocess", convert)
    return files


def test_a_folder_with_a_config_is_served_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path


def test_a_gguf_file_is_converted_once_under_its_own_name(tmp_path: Path, converted: list[Path]) -> None:
    gguf = tmp_path / "My-Model.Q4_1.gguf"
    gguf.write_bytes(b"one")
    folder = resolve(gguf)
    assert folder.name == "My-Model.Q4_1"
    assert resolve(gguf) == folder
    assert converted == [gguf]


def test_a_changed_gguf_file_is_converted_anew(tmp_path: Path, converted: list[Path]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"one")
    resolve(gguf)
    os.utime(gguf, ns=(0, 0))
    resolve(gguf)
    assert len(converted) == 2


def test_two_gguf_files_of_one_name_are_two_models(tmp_path: Path, converted: list[Path]) -> None:
    folders = set()
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "model.gguf").write_bytes(b"one")
        folders.add(resolve(tmp_path / place / "model.gguf"))
    assert len(folders) == 2


def test_what_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"/absent does not exist: MODEL is a folder with config\.json"):
        resolve(tmp_path / "absent")
    (tmp_path / "model.bin").touch()
    with pytest.raises(UsageError, match=r"/model\.bin is a file: MODEL must be a folder with config\.json"):
        resolve(tmp_path / "model.bin")
    with pytest.raises(UsageError, match=r"has no config\.json, .*: is the download complete\?$"):
        resolve(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match=r"has no config\.json, .*: did you mean .*/model\.gguf\?$"):
        resolve(tmp_path)
