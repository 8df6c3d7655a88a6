"""The folder where converted models are kept, and how an entry gets there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.errors import UsageError

Progress = Callable[[str, float], None]
"""Told what is being done, and which fraction of it is done."""

_COMPLETE = ".complete"


def cache_folder() -> Path:
    """`$APPLIANCE_CACHE`, else `appliance` in `$XDG_CACHE_HOME` or `~/.cache`. It need not exist."""
    own = os.environ.get("APPLIANCE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "appliance"


def cached(key: str, version: str, make: Callable[[Path], None]) -> Path:
    """The cache entry `key`, made by `make` where it is missing, partial or of another `version`.

    `make` creates the folder it is given; beside it, it may leave what it likes. The folder is moved into place at
    once, or thrown away if `make` raises. A second process waits for the first.

    Raises UsageError where the cache cannot be written, and whatever `make` raises.
    """
    entry = cache_folder() / key
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(entry.name + ".lock")):
            if not _is_complete(entry, version):
                _make(entry, version, make)
    except OSError as error:
        raise _cache_error(error) from error
    return entry


def _is_complete(entry: Path, version: str) -> bool:
    """True where the list of files, written last, is of this version and each file has the size it says."""
    try:
        found, *lines = (entry / _COMPLETE).read_text().splitlines()
        sizes = {name: int(size) for size, name in (line.split(" ", 1) for line in lines)}
        return found == version and all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _make(entry: Path, version: str, make: Callable[[Path], None]) -> None:
    scratch = entry.with_name(entry.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        folder = scratch / entry.name
        make(folder)
        lines = [version, *(f"{file.stat().st_size} {file.name}" for file in sorted(folder.iterdir()))]
        (folder / _COMPLETE).write_text("\n".join(lines))
        shutil.rmtree(entry, ignore_errors=True)
        folder.rename(entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def disk_full() -> UsageError:
    """The error to raise where an entry does not fit on the cache's disk."""
    return UsageError(
        f"the disk of {cache_folder()} is full: free some space there or set APPLIANCE_CACHE to another folder"
    )


def _cache_error(error: OSError) -> UsageError:
    if error.errno == errno.ENOSPC:
        return disk_full()
    return UsageError(
        f"the cache folder {cache_folder()} cannot be used ({error.strerror}): set APPLIANCE_CACHE to a folder that "
        "can be written"
    )
