"""Typed, bounded reading of one JSON object of a model folder. It knows no key's meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.errors import CheckpointError


class ConfigFields:
    """The fields of config.json or of an object in it; null counts as absent unless a reader says otherwise.

    Every reader raises CheckpointError naming the key, what was found and what was expected; a default of None means
    that the field must be there.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        """name: of the object, for messages; empty for config.json itself."""
        self.values = values
        self._name = name
        self._prefix = f"{name}." if name else ""

    def over(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """These fields, and of `defaults` those whose keys are absent here."""
        return ConfigFields({**defaults, **self.values}, self._name)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        return float(self._number(key, low, high, default))

    def integer(self, key: str, high: int, default: int | None = None, low: int = 1) -> int:
        value = self._number(key, low, high, default)
        if value != int(value):
            raise self.wrong(key, f"an integer between {low} and {high}")
        return int(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def object(self, key: str) -> ConfigFields:
        """The fields of an object; none where there is no object."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return ConfigFields(value, self._prefix + key)

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error of a field that is not what was expected, to be raised."""
        return CheckpointError(
            f"config.json says {self._prefix + key!r} is {self.values.get(key)!r}: expected {expected}."
        )

    def _number(self, key: str, low: float, high: float, default: float | None) -> int | float:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(
                    f"config.json has no {self._prefix + key!r}: a number between {low:g} and {high:g} is needed."
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(key, f"a number between {low:g} and {high:g}")
        return value
