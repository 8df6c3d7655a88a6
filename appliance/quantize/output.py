"""The folder that is written: whole or not at all, and with all that a standard model folder holds beside weights."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from appliance.errors import UsageError
from appliance.quantize.scheme import Scheme
from appliance.quantize.source import Source, older_config, older_tokenizer_config
from appliance.tokenizer import read_json

# Never Python, never weights.
_COPIED = (
    *("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md"),
)


def check_out(out: Path, model: Path, force: bool) -> None:
    """Raises UsageError where writing `out` would destroy the model itself or, without `force`, anything."""
    if not out.name or out.resolve() == Path.cwd() or out.is_symlink() or os.path.ismount(out):
        raise UsageError(
            f"--out {out} is the current folder, a link or a mount point, whose place a finished folder cannot take: "
            "name a new folder"
        )
    if out.resolve() in (model.resolve(), *model.resolve().parents):
        raise UsageError(f"--out {out} holds the model that is to be quantised: name another folder")
    if model.resolve() in out.resolve().parents:
        raise UsageError(f"--out {out} lies in the folder of the model that is to be quantised: name another one")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"--out {out} is to be made in a folder that does not exist: make {parent}")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"--out {out} cannot be made: {parent} may not be written to, name another folder")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() and not force:
        raise UsageError(f"--out {out} exists and is not empty: name another folder, or replace it with --force")
    if out.exists() and not (out / "config.json").is_file():
        raise UsageError(f"--out {out} is no model folder (it has no config.json), so --force will not replace it")


def free_name(path: Path) -> Path:
    """`path`, or where there is something of that name the next one with a number: nothing of the user's is touched."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in (path, *itertools.islice(numbered, 1000)) if not os.path.lexists(name))


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A new folder to write into, OUT.partial, which becomes `out` at the end or is removed on any error."""
    partial = free_name(out.with_name(out.name + ".partial"))
    try:
        partial.mkdir()
    except OSError as error:
        raise UsageError(f"{partial} cannot be made ({error.strerror}): choose another --out") from error
    try:
        yield partial
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        if "No space left on device" not in str(error):
            raise
        raise UsageError(f"the disk of {out} is full: free some space there or name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_configuration(source: Source, scheme: Scheme, folder: Path) -> None:
    """Everything but the weights: config.json, the tokenizer's files, the chat template, the suggested sampling."""
    config = older_config(source.config) | {"quantization_config": scheme.config()}
    if scheme.method != "rtn":
        config["torch_dtype"] = "float16"  # as both packages write every weight
    _write_json(folder / "config.json", config)
    for name in _COPIED:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
    tokenizer_config = read_json(source.folder, "tokenizer_config.json")
    _write_json(folder / "tokenizer_config.json", older_tokenizer_config(tokenizer_config))


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
