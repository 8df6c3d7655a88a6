"""Where a setting's value comes from, and what is said of a wrong one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

from appliance.config import EngineConfig
from appliance.errors import UsageError
from appliance.settings import Settings


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; the settings of whoever runs the tests must not count."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"APPLIANCE_{name.upper()}", raising=False)
    return tmp_path


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings.load({}).port == 8000
    (empty_folder / "appliance.toml").write_text("port = 8001\nmodel = 'here'\n")
    assert Settings.load({}).port == 8001
    monkeypatch.setenv("APPLIANCE_PORT", "8002")
    assert Settings.load({}).port == 8002
    assert Settings.load({"port": "8003"}).port == 8003
    assert Settings.load({"port": "8003"}).model == "here"


def test_an_empty_environment_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_MODEL", "")
    assert Settings.load({}).model is None


def test_a_wrong_value_is_one_sentence_with_setting_value_and_source(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "appliance.toml").write_text("device = 'tpu'\n")
    with pytest.raises(
        UsageError, match=r"^device 'tpu' from appliance\.toml is not valid: .*'auto', 'cpu' or 'cuda'$"
    ):
        Settings.load({})
    monkeypatch.setenv("APPLIANCE_DEVICE", "gpu")
    with pytest.raises(UsageError, match=r"^device 'gpu' from APPLIANCE_DEVICE is not valid"):
        Settings.load({})
    with pytest.raises(UsageError, match=r"^device 'npu' from --device is not valid"):
        Settings.load({"device": "npu"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("port", "http"),
        ("host", ""),
        ("block_size", "17"),
        ("max_model_len", "0"),
        ("max_model_len", "long"),
        ("num_kv_blocks", "-1"),
        ("kv_cache_memory", "2 apples"),
        ("kv_cache_memory", "0"),
        ("max_num_seqs", "0"),
        ("threads", "-1"),
        ("dtype", "int8"),
        ("ui", "maybe"),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} '?{value}'? from --{name.replace('_', '-')} is not valid: "):
        Settings.load({name: value})


def test_an_unknown_setting_in_the_file_is_refused(empty_folder: Path) -> None:
    (empty_folder / "appliance.toml").write_text("prot = 8001\n")
    with pytest.raises(
        UsageError, match=r"^appliance\.toml holds 'prot', which is no setting: use one of model, .*port"
    ):
        Settings.load({})


def test_a_file_that_is_not_toml_is_one_sentence(empty_folder: Path) -> None:
    (empty_folder / "appliance.toml").write_text("port: 8001\n")
    with pytest.raises(UsageError, match=r"^appliance\.toml in .* is not valid TOML: "):
        Settings.load({})


@pytest.mark.parametrize(("text", "count"), [("2GiB", 2 << 30), ("1500MB", 1_500_000_000), ("4096", 4096)])
def test_memory_has_units(text: str, count: int) -> None:
    assert Settings.load({"kv_cache_memory": text}).engine_config(Path("m")).kv_cache_bytes == count


@pytest.mark.parametrize("name", ["max_model_len", "num_kv_blocks", "kv_cache_memory"])
def test_auto_leaves_the_choice_to_the_engine(name: str) -> None:
    assert getattr(Settings.load({name: "auto"}), name) is None


def test_lists_are_comma_separated_outside_toml(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_ALLOWED_HOSTS", "one.example, two.example,")
    assert Settings.load({}).allowed_hosts == ("one.example", "two.example")
    (empty_folder / "appliance.toml").write_text("allowed_origins = ['https://a.example', 'https://b.example']\n")
    assert Settings.load({}).allowed_origins == ("https://a.example", "https://b.example")


def test_api_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> None:
    monkeypatch.setenv("APPLIANCE_API_KEY", "first,second")
    settings = Settings.load({})
    assert [key.get_secret_value() for key in settings.api_key] == ["first", "second"]
    assert "first" not in repr(settings)
    monkeypatch.delenv("APPLIANCE_API_KEY")
    (empty_folder / "appliance.toml").write_text("api_key = 1234567\n")
    with pytest.raises(UsageError, match=r"^api_key from appliance\.toml is not valid") as refused:
        Settings.load({})
    assert "1234567" not in refused.value.message


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings.load({}).port = 1


def test_without_settings_the_engine_gets_its_own_defaults() -> None:
    assert Settings.load({}).engine_config(Path("m")) == EngineConfig(model="m", served_name="m")


def test_every_engine_setting_can_be_set() -> None:
    values = {
        "served_model_name": "name",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": "1024",
        "block_size": "32",
        "num_kv_blocks": "7",
        "max_num_seqs": "3",
        "max_num_batched_tokens": "99",
        "enable_prefix_caching": False,
        "allow_failed_self_test": True,
        "max_waiting": "5",
        "threads": "2",
    }
    config = Settings.load(values).engine_config(Path("m"))
    default = EngineConfig(model="")
    unchanged = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == getattr(default, f.name)]
    assert unchanged == ["kv_cache_bytes"]


def test_two_sizes_of_the_kv_cache_are_refused() -> None:
    with pytest.raises(UsageError, match="num_kv_blocks and kv_cache_memory both size the KV cache"):
        Settings.load({"num_kv_blocks": "7", "kv_cache_memory": "1GiB"}).engine_config(Path("m"))
