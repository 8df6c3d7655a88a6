"""What a model folder's configuration says about its quantisation. It knows keys and files; the tensors decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import CheckpointError
from appliance.quant.model_folder import read_json

# AutoGPTQ and AutoAWQ wrote files of their own before Hugging Face's key existed; AutoRound still does.
_OWN_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")


@dataclass(frozen=True, slots=True)
class DeclaredQuantization:
    """The quantisation keys of a configuration, None where the key is absent.

    method, layout: lower case; layout is `format`, `checkpoint_format`, `packing_format` or AWQ's `version`.
    overrides: the configuration gives some modules settings of their own.
    raw: the object as it is, for formats with keys of their own.
    """

    file: str
    method: str | None = None
    layout: str | None = None
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    overrides: bool = False
    writer: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


def declared_quantization(folder: Path, config: dict[str, Any]) -> DeclaredQuantization | None:
    """The folder's declaration, or None. Raises CheckpointError naming the file, the key and the value found."""
    for key in ("quantization_config", "compression_config"):
        raw = config.get(key)
        if raw is not None:
            if not isinstance(raw, dict):
                raise CheckpointError(f"config.json: {key} is a {type(raw).__name__}, an object was expected")
            return _parse(f"config.json {key}", raw)
    for name in _OWN_FILES:
        if (folder / name).is_file():
            return _parse(name, read_json(folder / name))
    return None


def _parse(file: str, raw: dict[str, Any]) -> DeclaredQuantization:
    method = _text(file, raw, "quant_method", "method")
    layout = _text(file, raw, "format", "checkpoint_format", "packing_format", "version")
    backend = _text(file, raw, "backend")
    if raw.get("is_marlin_format") is True:
        layout = "marlin"
    if method == "awq" and backend == "llm-awq":
        layout = backend  # gemv_fast words, whatever `version` says (transformers AwqConfig)
    if method in ("auto-round", "intel/auto-round") and layout is None:
        layout = backend
    if method is None and "zero_point" in raw:
        method = "awq"  # AutoAWQ's own file has no method
    meta = raw.get("meta")
    writer = str(meta.get("quantizer", "")) if isinstance(meta, dict) else ""
    return DeclaredQuantization(
        file=file,
        method=method,
        layout=layout,
        bits=_integer(file, raw, 1, "bits", "w_bit"),
        group_size=_group_size(file, raw),
        symmetric=_flag(file, raw, "sym"),
        act_order=_flag(file, raw, "desc_act"),
        overrides=bool(raw.get("dynamic") or raw.get("extra_config")),
        writer=writer.lower(),
        raw=raw,
    )


def _text(file: str, raw: dict[str, Any], *keys: str) -> str | None:
    for key in keys:
        value = raw.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise CheckpointError(f"{file}: {key} is {value!r}, a string was expected: correct the file")
            return value.lower()
    return None


def _flag(file: str, raw: dict[str, Any], key: str) -> bool | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{file}: {key} is {value!r}, true or false was expected: correct the file")
    return value


def _integer(file: str, raw: dict[str, Any], minimum: int, *keys: str) -> int | None:
    for key in keys:
        value = raw.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise CheckpointError(f"{file}: {key} is {value!r}, an integer of at least {minimum} was expected")
            return value
    return None


def _group_size(file: str, raw: dict[str, Any]) -> int | None:
    value = _integer(file, raw, -1, "group_size", "q_group_size")
    if value == 0:
        raise CheckpointError(f"{file}: group_size is 0, a positive integer or -1 (one group) was expected")
    return value
