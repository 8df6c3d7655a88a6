"""`appliance inspect`: what it says of a model is what loading that model says; of one on the hub, from its headers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from appliance.config import EngineConfig
from appliance.engine.core import EngineCore
from appliance.errors import CheckpointError, UnsupportedModelError, UsageError
from appliance.inspection import inspect_model
from appliance.model_details import ModelDetails, Verdict
from appliance.quant.checkpoint import open_checkpoint, open_headers
from appliance.quant.header_files import HeaderFiles
from appliance.quant.linear import spec_of
from tests.appliance.tiny_model import save_tiny_model
from tests.fake_hub import FakeHub, serve_hub
from tests.models.tiny import save_tiny
from tests.quant.gguf_writer import LARGE, mixed, write_gguf
from tests.quant.writers import MODULE

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "quant" / "fixtures"
CONFIG = EngineConfig("", dtype="bfloat16", num_kv_blocks=16)


def no_progress(stage: str, fraction: float) -> None:
    pass


def inspect(model: str | Path, **settings: Any) -> ModelDetails:
    return inspect_model(str(model), dataclasses.replace(CONFIG, **settings), no_progress)


def plain(folder: Path) -> Path:
    save_tiny(folder)
    return folder


def tied(folder: Path) -> Path:
    save_tiny(folder, tie_word_embeddings=True)
    return folder


def quantized(folder: Path) -> Path:
    save_tiny(folder, is_quantized=True)
    return folder


def mixed_widths(folder: Path) -> Path:
    """Projections that do not fuse, an exception, biases, norms of heads."""
    bits = {"v_proj": 0, "up_proj": 8, "lm_head": 8}
    save_tiny(folder, "qwen2", is_quantized=True, bits_of=lambda module: bits.get(module.rpartition(".")[2], 4))
    return folder


def normed_heads(folder: Path) -> Path:
    save_tiny(folder, "qwen3", is_quantized=True)
    return folder


def one_layer_on_disk(folder: Path) -> Path:
    """q, k and v, and gate and up, with their outputs in another order."""
    save_tiny(folder, "phi3", is_quantized=True, partial_rotary_factor=0.5)
    return folder


def part_of_a_model_that_sees(folder: Path) -> Path:
    """Tensors under other names, norms in float32."""
    save_tiny(folder, "gemma3_that_sees", is_quantized=True, tie_word_embeddings=True)
    return folder


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def experts(folder: Path) -> Path:
    """A layer with experts, a router that is computed in float32, and a layer without."""
    save_tiny(folder, "qwen3_moe", is_quantized=True, mlp_only_layers=[1], **EXPERTS)
    return folder


def stacked_experts(folder: Path) -> Path:
    save_tiny(folder, "qwen2_moe", is_stacked=True, shared_expert_intermediate_size=96, **EXPERTS)
    return folder


def gated_delta_layers(folder: Path) -> Path:
    """A layer that keeps a state, with plain gates beside quantised projections, and one of gated attention."""
    save_tiny(folder, "qwen3_5", is_quantized=True)
    return folder


def gated_delta_layers_and_experts(folder: Path) -> Path:
    save_tiny(folder, "qwen3_5_moe_that_sees", shared_expert_intermediate_size=96, **EXPERTS)
    return folder


MODELS = [
    plain,
    tied,
    quantized,
    mixed_widths,
    normed_heads,
    one_layer_on_disk,
    part_of_a_model_that_sees,
    experts,
    stacked_experts,
    gated_delta_layers,
    gated_delta_layers_and_experts,
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("save", MODELS)
def test_what_is_said_is_what_loading_says(save: Callable[[Path], Path], dtype: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    loaded = EngineCore.load(dataclasses.replace(CONFIG, model=str(folder), dtype=dtype)).model_info.details
    assert loaded is not None
    found = inspect(folder, dtype=dtype)
    assert found.self_test == loaded.self_test
    assert found.self_test.verdict is Verdict.PASSED
    assert found.layers == loaded.layers
    assert found.memory.weights == loaded.memory.weights
    assert found.memory.kv_cache == loaded.memory.kv_cache
    assert found.memory.recurrent_state == loaded.memory.recurrent_state
    assert dataclasses.replace(found, memory=loaded.memory, warnings=loaded.warnings) == loaded


@pytest.mark.parametrize("save", MODELS)
def test_without_the_self_test_the_plan_is_the_same_and_no_weight_is_read(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = save(tmp_path)
    tested = inspect(folder)
    found = inspect_model(str(folder), CONFIG, no_progress, runs_self_test=False)
    assert found.self_test.verdict is Verdict.NOT_RUN
    assert "--no-self-test" in found.self_test.summary
    assert [dataclasses.replace(layer, nbytes=0) for layer in found.layers] == [
        dataclasses.replace(layer, nbytes=0) for layer in tested.layers
    ]
    assert found.num_parameters == tested.num_parameters
    assert found.memory.weights == pytest.approx(tested.memory.weights, rel=0.02)


def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    for is_tied in (False, True):
        model = save_tiny(tmp_path / str(is_tied), tie_word_embeddings=is_tied)
        assert inspect(tmp_path / str(is_tied)).num_parameters == model.num_parameters()
    model = save_tiny(tmp_path / "experts", "qwen3_moe", **EXPERTS)
    assert inspect(tmp_path / "experts").num_parameters == model.num_parameters()
    model = save_tiny(tmp_path / "hybrid", "qwen3_5")
    assert inspect(tmp_path / "hybrid").num_parameters == model.num_parameters()


def test_a_context_beyond_a_models_short_factors_is_warned_of_as_in_loading(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    save_tiny(tmp_path, "phi3", rope_parameters=longrope, original_max_position_embeddings=32)
    for max_model_len, is_warned in ((None, True), (64, True), (32, False)):
        found = inspect(tmp_path, max_model_len=max_model_len)
        assert any("rotary factors for long texts" in warning for warning in found.warnings) == is_warned
        assert found.max_position == 256
        loaded = EngineCore.load(dataclasses.replace(CONFIG, model=str(tmp_path), max_model_len=max_model_len))
        assert loaded.model_info.details is not None
        assert loaded.model_info.details.max_position == 256


@pytest.mark.parametrize("folder", sorted(path for path in FIXTURES.iterdir() if path.is_dir()), ids=lambda p: p.name)
def test_a_spec_is_known_without_reading(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    modules = [name.removesuffix(".weight") for name in checkpoint.names() if name.endswith(".weight")]
    assert modules
    for module in modules:
        assert checkpoint.spec(module) == spec_of(checkpoint.linear(module))


def headers_of(folder: Path) -> HeaderFiles:
    with safe_open(folder / "model.safetensors", "pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the handle is not a mapping
        header = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    return HeaderFiles({"model.safetensors": header})


@pytest.mark.parametrize(
    "folder",
    sorted([*FIXTURES.glob("gptq_*/"), *FIXTURES.glob("awq_gemm*/"), *FIXTURES.glob("compressed_tensors_*/")]),
    ids=lambda p: p.name,
)
def test_headers_and_configuration_tell_the_spec(folder: Path) -> None:
    whole, headers = open_checkpoint(folder), open_headers(folder, headers_of(folder))
    assert headers.names() == whole.names()
    assert headers.spec(MODULE) == whole.spec(MODULE)
    assert (headers.report.bits, headers.report.act_order) == (whole.report.bits, whole.report.act_order)


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("awq_gemv*/")), ids=lambda p: p.name)
def test_a_layout_whose_groups_only_its_scales_tell_is_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="download the model to inspect it"):
        open_headers(folder, headers_of(folder))


def test_a_gguf_file_is_inspected_as_it_is(tmp_path: Path) -> None:
    tensors, kinds = mixed(Kind.Q4_K, Kind.Q6_K)
    file = write_gguf(tmp_path / "model.gguf", tensors, kinds, shape=LARGE)
    found = inspect(file)
    assert found.format == "gguf"
    assert found.file_bytes == file.stat().st_size
    assert found.has_chat_template is False
    assert found.self_test.verdict is Verdict.PASSED
    assert {(layer.bits, layer.group_size) for layer in found.layers} == {(4, 32), (6, 16), (16, 0)}
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"], "nothing is converted"
    checkpoint = open_checkpoint(file)
    assert checkpoint.spec("model.layers.0.mlp.down_proj") == spec_of(checkpoint.linear("model.layers.0.mlp.down_proj"))


def test_a_damaged_model_is_described_with_all_its_faults(tmp_path: Path) -> None:
    mixed_widths(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.scales"].view(torch.int16)[0, 0] ^= 0x4000
    tensors["model.layers.1.self_attn.k_proj.qweight"].zero_()
    tensors["model.layers.1.self_attn.k_proj.bias"][2] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    found = inspect(tmp_path).self_test
    assert found.verdict is Verdict.FAILED
    assert found.summary.startswith("3 faults, the first: model.layers.0.mlp.down_proj: its largest scale")
    assert found.faults[1:] == (
        "model.layers.1.self_attn.k_proj: every code is 0",
        "model.layers.1.self_attn.k_proj.bias: it holds NaN or infinity",
    )


def test_a_cache_that_does_not_fit_is_said_and_the_rest_told(tmp_path: Path) -> None:
    found = inspect(plain(tmp_path), num_kv_blocks=1 << 40)
    assert found.memory.max_model_len == found.memory.kv_cache == 0
    assert any("KV cache would take" in warning for warning in found.warnings)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", "inspect", *arguments]
    settings = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120)


def test_the_command_prints_tables_or_json_and_fails_with_the_model(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    told = run(str(folder))
    assert told.returncode == 0, told.stderr
    for words in ("LlamaForCausalLM", "passed", "*.self_attn.q_proj + k_proj + v_proj (2)", "Not triton_w4a16"):
        assert words in told.stdout
    value = json.loads(run(str(folder), "--json", "--no-self-test").stdout)
    assert value["self_test"]["verdict"] == "not run"
    assert set(value) == {field.name for field in dataclasses.fields(ModelDetails)}

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    failed = run(str(folder))
    assert failed.returncode == 3
    assert "model.norm.weight: it holds NaN or infinity" in failed.stdout


# The hub's address is read once, when its library is imported: each of these asks in a process of its own.
def ask_hub(hub: FakeHub, repo_id: str = "owner/model", **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return run(repo_id, "--json", **settings)


def test_a_model_on_the_hub_is_described_by_its_headers_alone(tmp_path: Path) -> None:
    folder = mixed_widths(tmp_path / "model")
    large = load_file(folder / "model.safetensors") | {"stray": torch.zeros(1 << 18)}
    save_file(large, folder / "model.safetensors")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    local = dataclasses.asdict(inspect(folder, num_kv_blocks=None))
    with serve_hub(FakeHub(folder)) as hub:
        answer = ask_hub(hub, HF_HOME=str(tmp_path / "home"))
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["model"] == "owner/model"
    assert found["self_test"]["verdict"] == "not run"
    assert "headers" in found["self_test"]["summary"]
    for name in ("description", "bits", "group_size", "num_parameters", "file_bytes", "has_chat_template"):
        assert found[name] == local[name], name
    plans = [(layer["layers"], layer["count"], layer["spec"], layer["decode"]) for layer in found["layers"]]
    assert plans == [
        (list(layer["layers"]), layer["count"], layer["spec"], layer["decode"]) for layer in local["layers"]
    ]
    assert any("qzeros were not read" in line for line in found["evidence"])
    assert hub.sent["model.safetensors"] <= 100_001 < (folder / "model.safetensors").stat().st_size
    assert set(hub.sent) == {"model.safetensors", "config.json"}
    assert not (tmp_path / "home" / "hub").exists()


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with serve_hub(FakeHub(folder)) as hub:
        answer = ask_hub(hub)
    assert json.loads(answer.stdout)["description"] == "GPTQ 4-bit, group 32, asymmetric", answer.stderr


@pytest.mark.parametrize(
    ("repo_id", "gated", "words"),
    [
        ("owner/other", False, "owner/other is neither a folder here nor a model that the hub shows"),
        ("owner/model", True, "owner/model is gated: accept its terms"),
    ],
)
def test_a_missing_and_a_gated_model_are_told_in_a_sentence(
    repo_id: str, gated: bool, words: str, tmp_path: Path
) -> None:
    with serve_hub(FakeHub(plain(tmp_path), gated=gated)) as hub:
        answer = ask_hub(hub, repo_id)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith(f"error: {words}")
    assert "Traceback" not in answer.stderr


def test_a_hub_that_is_not_there_and_one_that_must_not_be_asked_are_told_in_a_sentence(tmp_path: Path) -> None:
    nowhere = FakeHub(tmp_path, url="http://127.0.0.1:9")
    answer = ask_hub(nowhere)
    assert answer.returncode == 2
    assert "owner/model is no folder here, and the hub could not be asked" in answer.stderr
    answer = ask_hub(nowhere, HF_HUB_OFFLINE="1")
    assert answer.returncode == 2
    assert "HF_HUB_OFFLINE" in answer.stderr


def test_a_model_on_the_hub_without_safetensors_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with serve_hub(FakeHub(tmp_path)) as hub:
        answer = ask_hub(hub)
        assert answer.returncode == 3
        assert "error: owner/model holds only pickled weights (pytorch_model.bin)" in answer.stderr
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
        answer = ask_hub(hub)
        assert answer.returncode == 3
        assert "error: model.safetensors of owner/model has no header that can be read" in answer.stderr


@pytest.mark.parametrize("model", ["no/such/folder", "nothing-here", "no/file.gguf"])
def test_what_is_neither_here_nor_an_id_is_not_asked_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.inspection.HubModel", None)
    with pytest.raises(UsageError, match="does not exist"):
        inspect(model)


def test_an_architecture_that_is_not_served_is_refused_as_in_loading(tmp_path: Path) -> None:
    folder = plain(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not served"):
        inspect(folder)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 97}))
    for tests in (True, False):
        with pytest.raises(CheckpointError, match=r"config\.json says"):
            inspect_model(str(folder), CONFIG, no_progress, tests)


@pytest.mark.parametrize("name", ["./no-such-model", "a/../b", "a./b", "a--b/c", "~nosuch/x", "a" * 300])
def test_a_mistyped_path_is_one_sentence(name: str) -> None:
    told = run(name, HF_HUB_OFFLINE="1")
    assert told.returncode in (1, 2)
    assert "Traceback" not in told.stderr
    assert "error: " in told.stderr


def test_links_to_nothing_and_pipes_are_passed_by(tmp_path: Path) -> None:
    folder = plain(tmp_path)
    (folder / "extra.safetensors").symlink_to("nowhere")
    os.mkfifo(folder / "tokenizer_config.json")
    assert inspect(folder).self_test.verdict is Verdict.PASSED


def test_a_layer_that_is_no_matrix_is_named(tmp_path: Path) -> None:
    folder = plain(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flatten()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape .*a matrix was expected"):
        inspect(folder)
