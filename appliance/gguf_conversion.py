"""A .gguf file becomes a folder: canonical weights, config, tokenizer.json, chat template, generation_config.json.

The conversion runs in a process of its own, `python -m appliance.gguf_conversion GGUF FOLDER`, since it needs torch and
transformers, which the front process never imports. It prints JSON objects, one a line: progress, or the error it ends
with.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError, CheckpointError, UnsupportedModelError
from appliance.model_cache import Progress, disk_full

CONVERSION_VERSION = "1"
"""Raise it when the same .gguf must be converted anew."""
# Ways to split text whose vocabularies were not made by merging (llama.cpp's llama-vocab.cpp, tokenizer_pre): a piece
# that is a token is taken whole, and a text begins with the first token unless the file says otherwise.
_WHOLE_PIECES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


def convert_in_subprocess(gguf: Path, folder: Path, progress: Progress) -> None:
    """Convert `gguf` into the new folder `folder`. Raises CheckpointError with the reason if it cannot be served,
    UsageError if the disk is full.
    """
    # -P: nothing is imported from the user's working folder.
    command = [sys.executable, "-P", "-m", "appliance.gguf_conversion", str(gguf), str(folder)]
    what = f"Converting {gguf.name}"
    progress(what, 0.0)
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise CheckpointError(message["error"])
                progress(what, message["progress"])
            status = process.wait()
        finally:
            process.kill()
        if status != 0:
            errors.seek(0)
            raise _failure(gguf, errors.read().strip())


def _failure(gguf: Path, errors: str) -> ApplianceError:
    if "No space left on device" in errors:
        return disk_full()
    reason = errors.splitlines()[-1] if errors else "the process was killed; is there too little memory?"
    return CheckpointError(f"{gguf} could not be converted: {reason}")


def convert(gguf: Path, folder: Path, report: Callable[[float], None]) -> None:
    """Convert in this process, with files of its own beside `folder`. Raises CheckpointError; they may be left then."""
    from appliance.quant.checkpoint import open_checkpoint
    from appliance.quant.formats.canonical import save_canonical

    checkpoint = open_checkpoint(gguf)
    tokenizer = folder.with_name("tokenizer")
    tokenizer.mkdir()
    save_tokenizer(gguf, tokenizer)  # before the weights, which take long: it may refuse
    save_canonical(checkpoint, folder, lambda written, of: report(written / of))
    for file in tokenizer.iterdir():
        file.rename(folder / file.name)
    tokenizer.rmdir()


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the file's tokenizer, chat template and special tokens as tokenizer.json, chat_template.jinja, and so on.

    Raises UnsupportedModelError where the file splits text in a way that is not known.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    fields = GGUFReader(gguf).fields

    def value(key: str) -> Any:
        field = fields.get(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    # Not AutoTokenizer, which wants to know the model's architecture; what it makes is the same.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split = value("pre")
    if split == "smollm":
        # transformers 5.24 does not know this one: every digit stands alone (SmolLM2's own tokenizer.json).
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif value("model") == "gpt2" and split not in {None, "gpt-2", "default", *GGUF_PRE_TOKENIZER_SPLITS}:
        raise UnsupportedModelError(
            f"{gguf} splits text the way {split!r}, which is not known here, so prompts would be encoded wrongly: "
            "serve the model's GPTQ or AWQ checkpoint instead"
        )
    elif split in _WHOLE_PIECES:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if value("add_bos_token") is None:
            tokenizer.add_bos_token = True
            tokenizer.update_post_processor()
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    generation_config = {name: value(key) for name, key in keys.items() if value(key) is not None}
    # The end of a turn, where it is not the end of a text.
    ends = [value(key) for key in ("eos_token_id", "eot_token_id") if value(key) is not None]
    if len(set(ends)) > 1:
        generation_config["eos_token_id"] = ends
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=1))


def _main() -> int:
    messages = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no message

    def report(fraction: float) -> None:
        print(json.dumps({"progress": fraction}), file=messages, flush=True)

    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), report)
    except CheckpointError as error:
        print(json.dumps({"error": error.message}), file=messages, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
