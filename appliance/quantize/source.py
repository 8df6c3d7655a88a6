"""The model to quantise: a folder of plain safetensors, and the view of it that an older transformers can load.

transformers 5 writes keys that 4.51 takes no notice of (`rope_parameters`: it would compute with another base
frequency and say nothing) and a tokenizer class that it does not know.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import UnsupportedModelError, UsageError
from appliance.model_source import resolve_model
from appliance.models.registry import architecture_of
from appliance.quant.checkpoint import Checkpoint, open_checkpoint
from appliance.quant.model_folder import INDEX_NAME, weight_files

_QUANTIZED_LAYER = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """shapes: (N, K) of every module to quantise: the linear layers of the blocks, never embeddings and lm_head."""

    folder: Path
    checkpoint: Checkpoint
    shapes: dict[str, tuple[int, int]]

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config


def open_source(model: str) -> Source:
    """Raises UsageError where MODEL is not an unquantised folder, CheckpointError where it is damaged or not served."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        raise UsageError(
            f"{path} is a .gguf file, whose weights are rounded already: give the folder of 16-bit safetensors that it "
            "was made from"
        )
    folder = resolve_model(model, lambda what, fraction: None)
    checkpoint = open_checkpoint(folder)
    if checkpoint.report.bits:
        raise UsageError(
            f"{folder} is quantised already ({checkpoint.report.describe()}): give the folder of 16-bit safetensors "
            "that it was made from"
        )
    architecture_of(checkpoint.config)
    shapes = {}
    for name in checkpoint.names():
        module = name.removesuffix(".weight")
        if module != name and _QUANTIZED_LAYER.fullmatch(module):
            N, K = checkpoint.tensor(name).shape
            shapes[module] = (N, K)
    if not shapes:
        raise UnsupportedModelError(
            f"{folder} has no weights named model.layers.*_proj.weight, which are what is quantised: use another model"
        )
    return Source(folder, checkpoint, shapes)


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json in the words of transformers 4.51, which 5 reads too. Code that it names is left out: none is run."""
    older = {key: value for key, value in config.items() if key not in ("rope_parameters", "auto_map", "dtype")}
    if "dtype" in config:
        older["torch_dtype"] = config["dtype"]
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            older[key] = rope.pop(key)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    older["rope_scaling"] = None
    if kind != "default":
        if "original_max_position_embeddings" in config:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        older["rope_scaling"] = rope | {"rope_type": kind}
    return older


def older_tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json that transformers 4.51 and 5 both load: a class that both know, code left out."""
    older = {key: value for key, value in config.items() if key != "auto_map"}
    if older.get("tokenizer_class") in (None, "TokenizersBackend"):
        older["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(older.get("extra_special_tokens"), list):  # 4.51 wants names for them
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def link_weights(source: Source, folder: Path) -> None:
    """Make `folder` a model folder of the same weights for transformers 4.51, by links: config.json and safetensors."""
    (folder / "config.json").write_text(json.dumps(older_config(source.config)))
    files, weight_map = weight_files(source.folder)
    if weight_map is None:
        (folder / "model.safetensors").symlink_to(files[0].absolute())
        return
    for file in files:
        (folder / file.name).symlink_to(file.absolute())
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
