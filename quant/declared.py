"""What a model folder's configuration says about its quantisation. It knows keys and files; the tensors decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.errors import CheckpointError
from appliance.quant.autoround import AUTOROUND_METHODS, autoround_layout
from appliance.quant.model_folder import read_json
from appliance.quant.module_patterns import ModulePattern

# AutoGPTQ and AutoAWQ wrote files of their own before Hugging Face's key existed; AutoRound still does.
_OWN_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
_WORD_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


@dataclass(frozen=True, slots=True, eq=False)
class DynamicRule:
    """What one pattern of GPTQModel's `dynamic` says of the modules it matches: that they are left unquantised, or
    settings of their own, by their fields of DeclaredQuantization.
    """

    pattern: ModulePattern
    excluded: bool
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeclaredQuantization:
    """The quantisation keys of a configuration, None where the key is absent.

    method, layout: lower case; layout is `format`, `checkpoint_format`, AWQ's `version`, or what AutoRound's packing
        stands for: gptq, gptq_v2, gemm.
    zero_point: AWQ's, true where zero points are stored.
    word_bits: of GPTQModel's `pack_dtype`. static_groups: act-order whose groups are in natural order all the same.
    excluded: of one module (`for_module`), that it is declared unquantised.
    overrides: some modules have settings of their own that `for_module` does not resolve.
    raw: the object as it is, for formats with keys of their own.
    """

    file: str
    method: str | None = None
    layout: str | None = None
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    zero_point: bool | None = None
    act_order: bool | None = None
    static_groups: bool = False
    word_bits: int | None = None
    excluded: bool = False
    overrides: bool = False
    writer: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[DynamicRule, ...] = ()
    _resolved: dict[str, DeclaredQuantization] = field(default_factory=dict, init=False, repr=False, compare=False)

    def for_module(self, module: str) -> DeclaredQuantization:
        """The declaration as it applies to `module`, given by its full name: the first rule that matches decides."""
        if not self.rules:
            return self
        if module not in self._resolved:  # asked several times of each of many thousand experts
            rule = next((rule for rule in self.rules if rule.pattern.matches(module)), None)
            settings = {} if rule is None else {"excluded": rule.excluded, **rule.settings}
            self._resolved[module] = replace(self, **settings)
        return self._resolved[module]

    @property
    def packing(self) -> str | None:
        """The method whose words the tensors should have: AutoRound writes those of GPTQ and of AWQ."""
        if self.method not in AUTOROUND_METHODS:
            return self.method
        return None if self.layout is None else "awq" if self.layout == "gemm" else "gptq"


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
    layout = _text(file, raw, "format", "checkpoint_format", "version")
    backend = _text(file, raw, "backend")
    if raw.get("is_marlin_format") is True:
        layout = "marlin"
    if method == "awq" and backend == "llm-awq":
        layout = backend  # gemv_fast words, whatever `version` says (transformers AwqConfig)
    if method in AUTOROUND_METHODS:
        layout = autoround_layout(file, raw, _text(file, raw, "packing_format", "backend"))
    if method is None and "zero_point" in raw:
        method = "awq"  # AutoAWQ's own file has no method
    meta = raw.get("meta")
    writer = str(meta.get("quantizer", "")) if isinstance(meta, dict) else ""
    return DeclaredQuantization(
        file=file,
        method=method,
        layout=layout,
        zero_point=_flag(file, raw, "zero_point"),
        static_groups=any(isinstance(place, dict) and place.get("static_groups") is True for place in (raw, meta)),
        overrides=bool(raw.get("extra_config")),
        writer=writer.lower(),
        raw=raw,
        rules=_rules(file, raw),
        **_settings(file, raw),
    )


def _settings(file: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that a single module may have otherwise; those whose key is absent are left out."""
    fields = {
        "bits": _integer(file, raw, 1, "bits", "w_bit"),
        "group_size": _group_size(file, raw),
        "symmetric": _flag(file, raw, "sym"),
        "act_order": _flag(file, raw, "desc_act"),
        "word_bits": _word_bits(file, raw),
    }
    return {field: value for field, value in fields.items() if value is not None}


def _rules(file: str, raw: dict[str, Any]) -> tuple[DynamicRule, ...]:
    """In the order they are tried: exclusions (`-:`) first, then the others (`+:` means nothing) in the file's order
    (GPTQModel config.py)."""
    entries = raw.get("dynamic") or {}
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{file}: dynamic is a {type(entries).__name__}, an object was expected: correct the file"
        )
    rules = []
    for key, settings in entries.items():
        excluded = key.startswith("-:")
        if not excluded and not isinstance(settings, dict):
            raise CheckpointError(f"{file}: dynamic {key!r} is {settings!r}, an object of settings was expected")
        pattern = ModulePattern(file, key[2:] if key[:2] in ("-:", "+:") else key)
        rules.append(DynamicRule(pattern, excluded, {} if excluded else _settings(f"{file} dynamic {key!r}", settings)))
    return tuple(sorted(rules, key=lambda rule: not rule.excluded))


def _word_bits(file: str, raw: dict[str, Any]) -> int | None:
    value = _text(file, raw, "pack_dtype")
    if value is None:
        return None
    name = value.removeprefix("torch.")
    if name not in _WORD_BITS:
        raise CheckpointError(f"{file}: pack_dtype is {value!r}, one of {', '.join(_WORD_BITS)} was expected")
    return _WORD_BITS[name]


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
