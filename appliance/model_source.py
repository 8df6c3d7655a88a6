"""Where MODEL lies: nothing, a folder or a .gguf file becomes the folder that the engine loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

from appliance.errors import UsageError
from appliance.gguf_conversion import CONVERSION_VERSION, convert_in_subprocess
from appliance.model_cache import Progress, cached


def resolve_model(model: str | None, progress: Progress) -> Path:
    """The folder to load; a .gguf file, and the built-in model (None), are converted once into the cache.

    Raises UsageError if there is nothing such, CheckpointError if a .gguf file cannot be converted.
    """
    if model is None:
        from appliance.builtin_model import built_in_model

        return built_in_model(progress)
    path = Path(model).expanduser().absolute()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _converted(path.resolve(), progress)
    if path.is_file():
        raise UsageError(f"{path} is a file: MODEL must be a folder with config.json and safetensors, or a .gguf file")
    if not path.is_dir():
        raise UsageError(
            f"{path} does not exist: MODEL is a folder with config.json and safetensors, a .gguf file, or left out "
            "for the built-in model"
        )
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"did you mean {ggufs[0]}?" if ggufs else "is the download complete?"
        raise UsageError(f"{path} has no config.json, which every checkpoint folder has: {hint}")
    return path


def _converted(gguf: Path, progress: Progress) -> Path:
    """One entry for each path; another size or time of change replaces it. Its last part is the model's name."""
    status = gguf.stat()
    key = f"{hashlib.sha256(str(gguf).encode()).hexdigest()[:12]}/{gguf.stem}"
    version = f"{CONVERSION_VERSION} {status.st_size} {status.st_mtime_ns}"
    return cached(key, version, lambda folder: convert_in_subprocess(gguf, folder, progress))
