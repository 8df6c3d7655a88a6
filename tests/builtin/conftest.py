"""The built-in model, downloaded and converted once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.builtin_model import built_in_model


@pytest.fixture(scope="session")
def folder() -> Path:
    return built_in_model(lambda stage, fraction: None)
