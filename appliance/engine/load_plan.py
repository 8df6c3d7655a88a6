"""What is decided before a model is read: its device, the dtype it is computed in, whether layers get dense copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from appliance.config import EngineConfig
from appliance.errors import UsageError
from appliance.kernels.backend import Backend, NoDeviceError, open_backend
from appliance.kernels.spec import Target
from appliance.models.config import ModelConfig

DENSE_SHARE = 0.25
"""Dense copies of quantised layers are kept while they take no more than this part of the available memory."""

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


def device_of(config: EngineConfig) -> Backend:
    """Raises UsageError where the device that is wished for cannot be used."""
    try:
        return open_backend(config.device)
    except NoDeviceError as error:
        raise UsageError(f"The model cannot run on {config.device}: {error}.") from error


def name_of(backend: Backend) -> str:
    """cpu, or cuda and which card."""
    card = f" ({torch.cuda.get_device_name(backend.device)})" if backend.device.type == "cuda" else ""
    return backend.name + card


def plan_target(
    wish: str, backend: Backend, config: Mapping[str, Any], model: ModelConfig, available_bytes: int
) -> tuple[Target, list[str]]:
    """Where and in which dtype the layers run, and what to warn about. wish: the setting `dtype`; config: config.json's
    object; available_bytes: memory that is free on the device.
    """
    dtype, warnings = _compute_dtype(wish, backend.name, config, model.needs_bfloat16)
    keep_dense = _keeps_dense(model, dtype, available_bytes, backend.name)
    return Target(backend.name, dtype, keep_dense, backend.device), warnings


def _compute_dtype(
    wish: str, device: str, config: Mapping[str, Any], needs_bfloat16: bool
) -> tuple[torch.dtype, list[str]]:
    """The dtype of activations and cache, and what to warn about. auto: bfloat16, on a card float16 where the
    checkpoint says so (as GPTQ and AWQ files do) and the model can do with its range.
    """
    if wish == "auto":
        stored = config.get("dtype", config.get("torch_dtype"))
        fits = device == "cuda" and stored == "float16" and not needs_bfloat16
        return torch.float16 if fits else torch.bfloat16, []
    dtype = DTYPES[wish]
    if dtype == torch.float16 and needs_bfloat16:
        return torch.bfloat16, ["This model leaves the range of float16, it is computed in bfloat16."]
    if dtype == torch.float16 and device == "cpu":
        # Measured 40 to 120 times slower.
        return torch.bfloat16, ["float16 on a CPU is computed in bfloat16, which is many times faster."]
    return dtype, []


def _keeps_dense(model: ModelConfig, dtype: torch.dtype, available_bytes: int, device: str) -> bool:
    """Whether quantised layers get a dense copy. The exact mode is dense by definition; else the copy must leave room
    for everything else, and a card needs none."""
    fits = model.linear_parameters * dtype.itemsize <= available_bytes * DENSE_SHARE
    return dtype == torch.float32 or (device == "cpu" and fits)
