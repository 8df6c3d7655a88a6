"""The Python that runs auto-gptq and autoawq: an environment of its own in the user's cache, made when first needed.

Both import only beside an older transformers, which cannot share an environment with the appliance. The list is that of
the dependency group `quantize` in pyproject.toml, which an installed appliance does not have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from appliance.errors import UsageError
from appliance.model_cache import Progress, cache_folder, cached, disk_full

REQUIREMENTS = ("torch==2.13.0", "auto-gptq==0.7.1", "autoawq==0.2.9", "transformers==4.51.3", "peft>=0.12,<0.16")
PYTHON = (3, 11)
"""The only one that auto-gptq 0.7.1, the newest of them, has wheels for that torch 2.13 runs on."""

_ENVIRONMENT = "quantize-environment"
_NEEDED_BYTES = 6 << 30
_EXPECTED_PACKAGES = 60  # that pip names while it downloads: what its progress is measured against
_WANTED = "--python PATH or APPLIANCE_QUANTIZE_PYTHON names the Python of an environment that already has them"
_NETWORK = (
    *("from versions: none", "Failed to establish a new connection", "NameResolutionError", "timed out"),
    *("Connection refused", "Network is unreachable", "ProxyError"),
)


def quantizing_python(given: Path | None, progress: Progress) -> Path:
    """The interpreter that has the packages: `given`, once checked, or the cached environment's, made if need be.

    Raises UsageError where `given` lacks a package, or the environment cannot be made.
    """
    if given is not None:
        _check(given)
        return given.absolute()  # never resolved: a link into a virtual environment is what makes it one
    version = " ".join([*REQUIREMENTS, *map(str, PYTHON)])
    return cached(_ENVIRONMENT, version, lambda folder: _make(folder, progress)) / "bin" / "python"


def _check(python: Path) -> None:
    code = "import importlib.metadata as m; print(m.version('auto-gptq'), m.version('autoawq'))"
    try:
        result = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise UsageError(f"{python} cannot be run ({error.strerror}): name a Python, or leave it out") from error
    if result.returncode != 0 or result.stdout.split() != ["0.7.1", "0.2.9"]:
        found = result.stdout.strip() or (result.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UsageError(
            f"{python} should have auto-gptq 0.7.1 and autoawq 0.2.9 but has {found}: install "
            f"{' '.join(REQUIREMENTS)} there, or leave it out and an environment is made"
        )


def _base_python() -> str:
    """A Python of the version the packages need."""
    name = "python{}.{}".format(*PYTHON)
    found = sys.executable if sys.version_info[:2] == PYTHON else shutil.which(name)
    if found is None:
        raise UsageError(
            "auto-gptq 0.7.1 and autoawq 0.2.9 need Python {}.{}, this is Python {}.{} and no {} is on the PATH: "
            "install it, or {}".format(*PYTHON, *sys.version_info[:2], name, _WANTED)
        )
    result = subprocess.run([found, "-c", "import ensurepip, venv"], capture_output=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise UsageError(f"{found} has no venv module: install it (on Debian and Ubuntu: apt-get install {name}-venv)")
    return found


def _make(folder: Path, progress: Progress) -> None:
    """Make the environment in `folder`. It is moved afterwards, which only its scripts would mind, and none is used."""
    base = _base_python()
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDED_BYTES:
        raise UsageError(
            f"only {free >> 20} MiB are free on the disk of {cache_folder()}, the quantisers' environment needs about "
            f"{_NEEDED_BYTES >> 30} GiB: free some space, set APPLIANCE_CACHE to another folder, or {_WANTED}"
        )
    what = "Making the quantisers' environment"
    progress(what, 0.0)
    made = subprocess.run(
        [base, "-m", "venv", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if made.returncode != 0:
        raise _error(made.stdout)
    command = [str(folder / "bin" / "python"), "-u", "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--timeout=15", "--retries=2", *REQUIREMENTS]
    # Beside the result, on the disk that must hold it anyway: /tmp may be small.
    scratch = folder.with_name("tmp")
    scratch.mkdir()
    settings = os.environ | {"TMPDIR": str(scratch), "PIP_USER": "0"}
    output: list[str] = []
    with subprocess.Popen(
        command, env=settings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        try:
            collected = 0
            for line in pip.stdout:
                output.append(line)
                collected += line.startswith("Collecting ")
                installing = line.startswith("Installing collected")
                progress(what, 0.8 if installing else min(0.7, 0.7 * collected / _EXPECTED_PACKAGES))
        finally:
            pip.kill()
    if pip.returncode != 0:
        raise _error("".join(output))


def _error(output: str) -> UsageError:
    if "No space left on device" in output:
        return disk_full()
    if any(sign in output for sign in _NETWORK):
        return UsageError(
            "the quantisers' environment could not be made, the package index was not reached: check the network and "
            f"pip's index and proxy settings, or {_WANTED}"
        )
    reason = next(
        (line for line in reversed(output.splitlines()) if line.lower().startswith("error")), "no reason given"
    )
    return UsageError(f"the quantisers' environment could not be made ({reason}): correct that, or {_WANTED}")
