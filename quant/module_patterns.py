"""Regular expressions over module names, as configurations of checkpoints hold them. A folder is not trusted: a pattern
that is invalid, or made to match for ever, is an error.
"""

from __future__ import annotations

import regex

from appliance.errors import CheckpointError

_SECONDS = 0.5


class ModulePattern:
    """One pattern of the file `file`. Raises CheckpointError when it is not a regular expression."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        try:
            self._pattern = regex.compile(text)
        except (regex.error, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{file}: {text[:80]!r} is not a regular expression over module names ({error}): correct the file"
            ) from error

    def matches(self, module: str) -> bool:
        """Whether the pattern matches from the start of `module`, which may go on after the match."""
        try:
            return self._pattern.match(module, timeout=_SECONDS) is not None
        except TimeoutError as error:
            raise CheckpointError(
                f"{self._file}: {self._text[:80]!r} takes more than {_SECONDS} seconds to match {module}, module names "
                "match at once: do not use this model, its configuration is malformed or hostile"
            ) from error
