"""docker-compose.yml and Dockerfile say what the appliance needs; no Docker runs here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.settings import Settings

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def service() -> dict[str, Any]:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert set(compose) == {"services", "volumes"}
    [(_, service)] = compose["services"].items()
    assert isinstance(service, dict)
    return service


def test_the_port_is_published_on_loopback_only(service: dict[str, Any]) -> None:
    assert service["ports"] == ["127.0.0.1:8000:8000"]


def test_a_card_is_reserved(service: dict[str, Any]) -> None:
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_it_restarts_and_is_watched(service: dict[str, Any]) -> None:
    assert service["restart"] == "unless-stopped"
    assert "http://127.0.0.1:8000/health" in service["healthcheck"]["test"][-1]
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_the_cache_outlives_the_container(service: dict[str, Any]) -> None:
    cache = re.search(r"APPLIANCE_CACHE=(\S+)", (ROOT / "Dockerfile").read_text())
    assert cache is not None
    assert f"cache:{cache[1]}" in service["volumes"]


def test_it_starts_with_its_own_environment_and_no_other(
    service: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As compose would set it where the user set nothing: ${NAME:-default} is default."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"APPLIANCE_{name.upper()}", raising=False)
    monkeypatch.setenv("APPLIANCE_HOST", "0.0.0.0")  # of the Dockerfile
    assert "APPLIANCE_HOST=0.0.0.0" in (ROOT / "Dockerfile").read_text()
    for name, value in service["environment"].items():
        assert name.removeprefix("APPLIANCE_").lower() in Settings.model_fields
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    settings = Settings.load({})
    assert settings.model is None
    assert settings.allowed_hosts == ("localhost",), "without it, any Host header would be answered"
    assert not settings.auth
