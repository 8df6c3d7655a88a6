"""What a compressed-tensors configuration says of each module: its groups, their targets, what it leaves out.

It knows keys and names, no tensors. Source of the keys and of the order in which targets count: the package
compressed-tensors (quantization/quant_config.py, quant_scheme.py, quant_args.py, utils/match.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.quant.module_patterns import ModulePattern

_FORMAT = "pack-quantized"
_USE = "use a weight-only pack-quantized checkpoint (W4A16, W8A16), GPTQ or AWQ"


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTarget:
    """An entry of targets or ignore: the name of a module, the name of a class, or `re:` and a pattern."""

    text: str
    pattern: ModulePattern | None

    def rank(self, module: str) -> int | None:
        """How closely it names `module`: 0 by name, 1 by pattern, 2 by class; None when it does not."""
        if self.text == module:
            return 0
        if self.pattern is not None:
            return 1 if self.pattern.matches(module) else None
        # A class can only be guessed from a name: embeddings are named so, all else that is packed is linear.
        named = "Embedding" if module.endswith(("embed_tokens", "embedding", "wte")) else "Linear"
        return 2 if self.text == named else None


@dataclass(frozen=True, slots=True, eq=False)
class WeightScheme:
    """One of the config_groups in `file`: how the weights of its targets are quantised.

    group_size: None is one group over all of K (strategy channel). act_order: weight_g_idx is expected.
    """

    file: str
    name: str
    targets: tuple[ModuleTarget, ...]
    bits: int
    symmetric: bool
    group_size: int | None
    act_order: bool


@dataclass(frozen=True, slots=True, eq=False)
class CompressedConfig:
    """A configuration's groups that quantise weights. warnings: sentences on what it asks for and does not get."""

    file: str
    schemes: tuple[WeightScheme, ...]
    ignore: tuple[ModuleTarget, ...]
    warnings: tuple[str, ...]

    def scheme_of(self, module: str) -> WeightScheme:
        """The scheme of a packed module. Raises CheckpointError when the configuration leaves the module unquantised.

        An exact name goes before a `re:` pattern, a pattern before a class; equals are taken in alphabetical order.
        """
        for entry in self.ignore:
            if entry.rank(module) is not None:
                raise CheckpointError(
                    f"{self.file} says with ignore {entry.text!r} that {module} is not quantised, but "
                    f"{module}.weight_packed exists: correct the configuration"
                )
        ranked = [
            (rank, target.text, scheme)
            for scheme in self.schemes
            for target in scheme.targets
            if (rank := target.rank(module)) is not None
        ]
        if not ranked:
            shown = ", ".join(target.text for scheme in self.schemes for target in scheme.targets[:4])
            raise CheckpointError(
                f"{module}.weight_packed exists, but no target in {self.file} config_groups matches {module} (found: "
                f"{shown or 'none'}): correct the configuration"
            )
        return min(ranked, key=lambda match: match[:2])[2]


def read_compressed_config(file: str, raw: Mapping[str, Any]) -> CompressedConfig:
    """The configuration in the object `raw`, which `file` holds.

    Raises CheckpointError naming a key, its value and what is allowed, UnsupportedModelError for schemes not served.
    """
    groups = raw.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise CheckpointError(f"{file}: config_groups is {groups!r}, an object was expected: correct the file")
    if raw.get("transform_config"):
        raise UnsupportedModelError(
            f"{file}: transform_config rotates activations as the model runs, which is not served: {_USE}"
        )
    schemes = []
    for name, group in groups.items():
        key = f"{file}: config_groups.{name}"
        if not isinstance(group, dict):
            raise CheckpointError(f"{key} is {group!r}, an object with targets and weights was expected")
        found = group.get("format") or raw.get("format")
        if group.get("weights") is None:
            continue
        if found not in (_FORMAT, None):
            raise UnsupportedModelError(f"{key} has format {found!r}, {_FORMAT!r} is supported: {_USE}")
        for kind in ("input_activations", "output_activations"):
            if group.get(kind) is not None:
                raise UnsupportedModelError(f"{key} quantises activations ({kind}), which is not served: {_USE}")
        schemes.append(_scheme(file, name, group))
    warnings = []
    if raw.get("kv_cache_scheme") is not None:
        warnings.append(f"{file} has a kv_cache_scheme, which is ignored: the KV cache keeps the type the engine gives")
    return CompressedConfig(file, tuple(schemes), _targets(file, file, raw, "ignore"), tuple(warnings))


def _scheme(file: str, name: str, group: Mapping[str, Any]) -> WeightScheme:
    key = f"{file}: config_groups.{name}"
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise CheckpointError(f"{key}.weights is {weights!r}, an object was expected: correct the file")
    bits, size, order = weights.get("num_bits", 8), weights.get("group_size"), weights.get("actorder")
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    symmetric = weights.get("symmetric", True)
    if kind != "int":
        raise UnsupportedModelError(f"{key}.weights.type is {kind!r}, 'int' is supported: {_USE}")
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise CheckpointError(f"{key}.weights.num_bits is {bits!r}, an integer from 2 to 8 is allowed: correct it")
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"{key}.weights.symmetric is {symmetric!r}, true or false was expected: correct it")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in ("group", "channel"):
        raise UnsupportedModelError(f"{key}.weights.strategy is {strategy!r}, 'group' and 'channel' are served: {_USE}")
    if strategy == "group" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise CheckpointError(f"{key}.weights.group_size is {size!r}, a positive integer was expected: correct it")
    if strategy == "channel" and size not in (None, -1):
        raise CheckpointError(
            f"{key}.weights has strategy 'channel' and group_size {size!r}, null was expected: correct one of them"
        )
    if order not in (None, True, False, "weight", "static", "group", "dynamic"):
        raise CheckpointError(
            f"{key}.weights.actorder is {order!r}, allowed are null, 'weight', 'static', 'group' and 'dynamic'"
        )
    return WeightScheme(
        file=file,
        name=name,
        targets=_targets(file, key, group, "targets"),
        bits=bits,
        symmetric=symmetric,
        group_size=size if strategy == "group" else None,
        act_order=order in (True, "group", "dynamic"),
    )


def _targets(file: str, place: str, raw: Mapping[str, Any], key: str) -> tuple[ModuleTarget, ...]:
    value = raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(f"{place}: {key} is {value!r}, a list of strings was expected: correct the file")
    return tuple(
        ModuleTarget(text, ModulePattern(file, text.removeprefix("re:")) if text.startswith("re:") else None)
        for text in value
    )
