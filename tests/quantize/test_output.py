"""What is written is whole or not there, and nothing of value is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import UsageError
from appliance.quantize.output import check_out, written_whole


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_folder_with_content_is_refused_unless_forced(tmp_path: Path) -> None:
    model, out = model_folder(tmp_path / "model"), model_folder(tmp_path / "out")
    with pytest.raises(UsageError, match="exists and is not empty: name another folder, or replace it with --force"):
        check_out(out, model, force=False)
    check_out(out, model, force=True)
    check_out(tmp_path / "new", model, force=False)
    (tmp_path / "empty").mkdir()
    check_out(tmp_path / "empty", model, force=False)


def test_force_replaces_only_model_folders(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary").touch()
    with pytest.raises(UsageError, match="is no model folder"):
        check_out(tmp_path / "home", model, force=True)


def test_the_model_itself_is_never_replaced(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "all" / "model")
    (tmp_path / "all" / "config.json").write_text("{}")
    for out in (model, tmp_path / "all"):
        with pytest.raises(UsageError, match="holds the model that is to be quantised"):
            check_out(out, model, force=True)
    with pytest.raises(UsageError, match="lies in the folder of the model"):
        check_out(model / "out", model, force=False)


@pytest.mark.parametrize("name", ["link", "dangling", ".", "", "/"])
def test_what_a_folder_cannot_take_the_place_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before anything is computed, not at the last step."""
    monkeypatch.chdir(tmp_path)
    model = model_folder(tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UsageError, match="a link or a mount point"):
        check_out(Path(name), model, force=True)


def test_a_folder_that_is_to_lie_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in a folder that does not exist"):
        check_out(tmp_path / "no" / "out", model_folder(tmp_path / "model"), force=False)


def test_the_folder_appears_at_the_end_and_replaces_the_old_one(tmp_path: Path) -> None:
    """What has the name of the unfinished folder is the user's and stays."""
    out = model_folder(tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis").touch()
    with written_whole(out) as partial:
        (partial / "new").touch()
        assert (out / "config.json").exists()
    assert [path.name for path in out.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out.partial" / "thesis").exists()


def test_nothing_is_left_of_a_failure_and_the_old_folder_stays(tmp_path: Path) -> None:
    out = model_folder(tmp_path / "out")

    def fail() -> None:
        with written_whole(out) as partial:
            (partial / "new").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
