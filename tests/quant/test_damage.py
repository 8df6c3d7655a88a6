"""Several hundred corruptions of small models: each ends in an error that says what is wrong, or in the right weights.

A corruption that no reader can see (UNSEEN) is listed with its reason, and the list is held to be true. Codes and
scales with other bits are not among the corruptions: any bits are some weight.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.self_test import tensor_fault
from tests.quant.compressed_tensors_writer import compressed_config, compressed_tensors, group
from tests.quant.damage import INDEX, Case, Files, cut, edited, folder_damage, random_bytes, with_quantization
from tests.quant.gguf_writer import weights, write_gguf
from tests.quant.writers import gptq_config, gptq_tensors, gptqmodel_zero_words, pack, random_integers

SHARDS = ("model-1.safetensors", "model-2.safetensors")
ROWS, COLUMNS, GROUP_SIZE = 128, 64, 32
SECONDS = 5.0
ADVICE = re.compile(
    r"(: |, )(download|correct|use|do not use|convert|quantise|add|check|give|save|merge) |expected|allowed|supported"
)

# What a format calls these keys, where it has a name of its own for them.
KEYS = {
    "gptq": {"symmetric": "sym", "act_order": "desc_act", "layout": "checkpoint_format"},
    "gptq symmetric": {"symmetric": "sym", "act_order": "desc_act", "layout": "checkpoint_format"},
    "awq": {"symmetric": "zero_point", "act_order": "desc_act", "layout": "version"},
    "compressed-tensors": {"bits": "num_bits", "act_order": "actorder", "layout": "format"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": gptq_config(GROUP_SIZE, desc_act=True, checkpoint_format="gptq", meta={"quantizer": "gptqmodel:1.0"}),
    "gptq symmetric": gptq_config(GROUP_SIZE, sym=True, checkpoint_format="gptq"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm", "zero_point": True},
    "compressed-tensors": compressed_config(group(4, GROUP_SIZE, symmetric=False, actorder="group")),
}
VALUES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 5, 8, 16, 0, -4, 1 << 70, 4.0, "4", True, [4], None),
    "group_size": (1, 16, 64, 128, 0, -2, -1, 1 << 70, 32.0, "32", False),
    "symmetric": (True, False, "yes", 1),
    "act_order": (True, False, "yes", "group"),
    "layout": ("gptq", "gptq_v2", "gemm", "gemv", "marlin", "pack-quantized", 4),
    "quant_method": ("gptq", "awq", "compressed-tensors", "fp8", 4, None),
}
# The file is sound and only its meaning is another. Format and corruption -> why.
UNSEEN = {
    ("gptq", "layout 'gptq_v2'"): "asymmetric zero points of version 1 are as good as those of version 2",
    ("gguf", "a matrix of F16 is said to be BF16"): "both take two bytes, any of which are a number",
}


class Hang(BaseException):
    """Not an Exception: no handler of the code under test may take it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def outcome(path: Path, expected: dict[str, Tensor]) -> str:
    """`refused`, `right`, `another shape`, or what is wrong with how the model at `path` was met."""
    try:
        with time_limit(SECONDS):
            checkpoint = open_checkpoint(path)
            found = {name: checkpoint.tensor(name) for name in expected}
    except CheckpointError as error:
        message = error.message
        if path.name not in message:
            return f"does not name the file: {message}"
        return "refused" if ADVICE.search(message) and "\n" not in message else f"is not a full sentence: {message}"
    except Hang:
        return f"hangs for {SECONDS} s"
    except Exception as error:  # any other type is what these tests look for
        return f"raises {error!r}"
    if any(found[name].shape != tensor.shape for name, tensor in expected.items()):
        return "another shape"  # which the engine refuses by name: every shape is held against config.json
    if any(tensor_fault(tensor, torch.float32) for tensor in found.values()):
        return "refused"  # by the self-test, which looks at all plain tensors when a model is loaded
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name].float(), tensor.float())]
    return f"silently reads another {wrong[0]}" if wrong else "right"


def check(kind: str, outcomes: dict[str, str]) -> None:
    unseen = {label for format_, label in UNSEEN if format_ == kind}
    wrong = {k: said for k, said in outcomes.items() if said not in ("refused", "right", "another shape")}
    assert {label: said for label, said in wrong.items() if label not in unseen} == {}
    assert [label for label in unseen if "silently" not in wrong.get(label, "")] == [], "UNSEEN names what is seen"
    assert list(outcomes.values()).count("refused") > len(outcomes) / 2


def awq_words(codes: Tensor) -> Tensor:
    return pack(codes.view(codes.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 1)


def module_tensors(kind: str, module: str) -> dict[str, Tensor]:
    codes, zeros, scales = random_integers(ROWS, COLUMNS, ROWS // GROUP_SIZE)
    order = (torch.arange(ROWS) // GROUP_SIZE)[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))]
    if kind == "gptq":
        return gptq_tensors(codes, gptqmodel_zero_words(zeros), scales, order, module)
    if kind == "gptq symmetric":
        return gptq_tensors(codes, gptqmodel_zero_words(torch.full_like(zeros, 8)), scales, None, module)
    if kind == "awq":
        words = {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}
        return {f"{module}.{name}": tensor for name, tensor in words.items()}
    return compressed_tensors(codes, zeros, scales, 4, order=order, module=module)


def sound_files(kind: str) -> Files:
    """A model of two shards, a packed module and a norm in each, and an index."""
    files: Files = {}
    weight_map: dict[str, str] = {}
    for layer, shard in enumerate(SHARDS):
        tensors = module_tensors(kind, f"model.layers.{layer}.mlp.up_proj")
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.linspace(0.5, 1.5, ROWS)
        files[shard] = save(tensors)
        weight_map |= dict.fromkeys(tensors, shard)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": ROWS, "quantization_config": CONFIGS[kind]}
    return files | {INDEX: json.dumps({"weight_map": weight_map}).encode(), "config.json": json.dumps(config).encode()}


def write(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def declarations(kind: str) -> Iterator[Case]:
    """Bits, groups, symmetry, order, zero convention and method that are not the file's."""
    for key, values in VALUES.items():
        for value in values:
            keys = {KEYS[kind].get(key, key): value}
            if kind == "compressed-tensors" and key not in ("layout", "quant_method"):
                changed = group(4, GROUP_SIZE, symmetric=False, actorder="group")
                changed["weights"] |= keys
                keys = {"config_groups": {"group_0": changed}}
            yield f"{key} {value!r}", edited("config.json", with_quantization, keys)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_damaged_folder_is_refused_or_read_rightly(tmp_path: Path, kind: str) -> None:
    files = sound_files(kind)
    names = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("mlp.up_proj", "input_layernorm")]
    sound = open_checkpoint(write(tmp_path / "sound", files))
    expected = {name: sound.tensor(name) for name in names}
    outcomes = {}
    for number, (label, damage) in enumerate([*folder_damage(files, SHARDS), *declarations(kind)]):
        folder = write(tmp_path / f"case-{number}", files)
        damage(folder)
        outcomes[label] = outcome(folder, expected)
    check(kind, outcomes)
    assert len(outcomes) > 300


def with_field(content: bytes, tensor: str, field: str, value: int) -> bytes:
    """A GGUF file whose entry of the matrix `tensor` says `value`. After the name: the number of dimensions, 4 bytes,
    two dimensions, 8 bytes each, the type, 4 bytes, and the offset, 8 bytes."""
    start = content.index(tensor.encode()) + len(tensor)
    places = {"K": (4, 8), "N": (12, 8), "type": (20, 4), "offset": (24, 8)}
    first, size = places[field]
    return content[: start + first] + value.to_bytes(size, "little") + content[start + first + size :]


def test_a_damaged_gguf_file_is_refused_or_read_rightly(tmp_path: Path) -> None:
    name, quantized, plain = "sound.gguf", "blk.0.ffn_up.weight", "blk.1.ffn_up.weight"
    tensors = weights()
    path = write_gguf(tmp_path / name, tensors, {quantized: Kind.Q4_1, plain: Kind.F16})
    content = path.read_bytes()
    sound = open_checkpoint(path)
    expected = {tensor: sound.tensor(tensor) for tensor in sound.names()}
    cases = [(f"cut to {percent} %", edited(name, cut, len(content) * percent // 100)) for percent in range(0, 100, 2)]
    for kind in Kind:
        cases.append((f"a matrix of Q4_1 is said to be {kind.name}", edited(name, with_field, quantized, "type", kind)))
        cases.append((f"a matrix of F16 is said to be {kind.name}", edited(name, with_field, plain, "type", kind)))
    for field in ("K", "N", "type", "offset"):
        for value in (0, 1, 32, 96, 1 << 20, (1 << 31) - 1):
            cases.append((f"{field} is {value}", edited(name, with_field, quantized, field, value)))
    entries, last = content.index(b"token_embd.weight"), content.rindex(b".ffn_down.weight")
    cases += [*random_bytes(name, 0, entries, 200), *random_bytes(name, entries, last, 200, seed=1)]
    outcomes = {}
    for number, (label, damage) in enumerate(cases):
        folder = write(tmp_path / str(number), {name: content})
        damage(folder)
        outcomes[label] = outcome(folder / name, expected)
    check("gguf", outcomes)
