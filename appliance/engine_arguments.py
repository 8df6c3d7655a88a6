"""The keywords of `LLM` and `AsyncLLMEngine` become an `EngineConfig`, the model's name a folder."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from appliance.client import ModelInfo
from appliance.config import EngineConfig
from appliance.errors import UsageError
from appliance.model_source import resolve_model

_UNLIMITED_QUEUE = 1 << 30
"""A program that hands over all its prompts at once waits for them anyway."""

log = logging.getLogger(__name__)


def engine_config(model: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration for a model (None: the built-in one, downloaded where it has not been yet).

    Raises UsageError if a keyword is not known or its value not allowed, or if there is no such model; CheckpointError
    if a .gguf file cannot be converted.
    """
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: no setting has this name; the settings are {', '.join(known)}")
    # Wrong values are told before anything is downloaded.
    values: dict[str, Any] = {"model": "", "max_waiting": _UNLIMITED_QUEUE, **settings}
    config = EngineConfig(**values)
    folder = resolve_model(None if model is None else os.fspath(model), _logged())
    return dataclasses.replace(config, model=str(folder), served_name=config.served_name or folder.name)


def log_warnings(info: ModelInfo) -> None:
    """Say once, after a load, where the engine does something else than was asked for."""
    for warning in info.warnings:
        log.warning("%s: %s", info.id, warning)


def _logged() -> Callable[[str, float], None]:
    seen: set[str] = set()

    def progress(stage: str, fraction: float) -> None:
        if stage not in seen:
            seen.add(stage)
            log.info("%s", stage)

    return progress
