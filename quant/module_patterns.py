"""Regular expressions over module names, as configurations of checkpoints hold them. A folder is not trusted: a pattern
that is invalid, or made to take memory or time without end, is an error.
"""

from __future__ import annotations

import math

import regex

from appliance.errors import CheckpointError

_SECONDS = 0.5
_MAX_LENGTH = 10_000
# Counted repeats are written out when a pattern is compiled, nested ones as often as their product says.
_MAX_REPEATS = 1_000_000
_REPEAT_COUNTS = regex.compile(r"\d+(?=[\d,]*\})")


class ModulePattern:
    """One pattern of the file `file`. Raises CheckpointError when it is not a regular expression of modest size."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        repeats = math.prod(max(1.0, float(count)) for count in _REPEAT_COUNTS.findall(text[:_MAX_LENGTH]))
        if len(text) > _MAX_LENGTH or repeats > _MAX_REPEATS:
            raise CheckpointError(
                f"{file}: {text[:80]!r} has {len(text)} characters and repeats up to {repeats:.3g} times, patterns "
                f"over module names may have {_MAX_LENGTH} and {_MAX_REPEATS}: do not use this model, its "
                "configuration is malformed or hostile"
            )
        try:
            self._pattern = regex.compile(text)
        except (regex.error, RecursionError) as error:
            raise CheckpointError(
                f"{file}: {text[:80]!r} is not a regular expression over module names ({error}): correct the file"
            ) from error

    def matches(self, module: str) -> bool:
        """Whether the pattern matches from the start of `module`, which may go on after the match."""
        try:
            return self._pattern.match(module, timeout=_SECONDS) is not None
        except TimeoutError as error:
            raise CheckpointError(
                f"{self._file}: {self._text[:80]!r} takes more than {_SECONDS} seconds to match {module}, patterns "
                "over module names match at once: do not use this model, its configuration is malformed or hostile"
            ) from error
