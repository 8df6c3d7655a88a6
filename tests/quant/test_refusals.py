"""Formats that are known and not served: each is named, from tensors or quant_method, with what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.quant.checkpoint import open_checkpoint
from tests.quant.writers import MODULE, write_folder

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
BYTES = torch.zeros(8, 8, dtype=torch.uint8)
INTEGERS = torch.zeros(8, 8, dtype=torch.int8)
WORDS = torch.zeros(8, 8, dtype=torch.int32)
HALVES = torch.ones(8, 8).half()
FLOAT8 = HALVES.to(torch.float8_e4m3fn)
SCALE = torch.ones(1)


def module(**tensors: Tensor) -> dict[str, Tensor]:
    """Tensors of one module, `_of_` for a dot within a name."""
    return {f"{MODULE}.{name.replace('_of_', '.')}": tensor.clone() for name, tensor in tensors.items()}


def refusal(folder: Path) -> str:
    with pytest.raises(UnsupportedModelError) as raised:
        open_checkpoint(folder)
    message = raised.value.message
    assert message.count(". ") == 0, "one sentence"
    return message


@pytest.mark.parametrize(
    ("tensors", "evidence", "name"),
    [
        (module(q_weight=WORDS, q_scale=WORDS, q_invperm=WORDS), "q_weight (I32)", "EXL2"),
        (module(trellis=WORDS.to(torch.int16), suh=HALVES, svh=HALVES), "trellis (I16)", "EXL3"),
        (module(weight=BYTES, weight_of_absmax=HALVES, weight_of_quant_map=HALVES), "absmax (F16)", "4 bits (NF4"),
        (module(weight=INTEGERS, SCB=HALVES), "SCB (F16)", "bitsandbytes at 8 bits"),
        (module(weight=FLOAT8, weight_scale_inv=HALVES), "weight_scale_inv (F16)", "block-wise FP8"),
        (module(weight=FLOAT8, weight_scale=SCALE, input_scale=SCALE), "F8_E4M3", "FP8 with a scale per tensor"),
        (module(weight=FLOAT8.to(torch.float8_e5m2)), "F8_E5M2", "FP8"),
        (module(weight=BYTES, weight_scale=FLOAT8, weight_scale_2=SCALE), "weight_scale_2 (F32)", "NVFP4"),
        (module(weight_packed=BYTES, weight_scale=FLOAT8, weight_global_scale=SCALE), "global_scale (F32)", "NVFP4"),
        (module(weight_packed=BYTES, weight_scale=BYTES), "weight_packed (U8)", "MXFP4"),
        ({f"{EXPERTS}_blocks": BYTES, f"{EXPERTS}_scales": BYTES.clone()}, "gate_up_proj_blocks (U8)", "MXFP4"),
        (module(compressed=HALVES, bitmask=BYTES), "bitmask", "2:4 sparsity"),
        (module(weight_packed=WORDS, scale_packed=HALVES, meta=WORDS.to(torch.int16)), "scale_packed", "2:4 sparsity"),
        (module(weight=INTEGERS, weight_scale=HALVES), "(I8)", "int-quantized (W8A8"),
        (module(weight=HALVES, weight_scale=HALVES), "weight (F16)", "saved uncompressed"),
        (module(W_q=BYTES, scale=HALVES, zero=HALVES), "W_q (U8)", "HQQ"),
        (module(codes=INTEGERS, codebooks=HALVES, scales=HALVES), "codebooks", "AQLM"),
        (module(Qidxs=WORDS.long(), SU=HALVES, SV=HALVES), "Qidxs (I64)", "QuIP#"),
        (module(weight=WORDS.view(torch.uint32), scales=HALVES, biases=HALVES), "weight (U32)", "MLX"),
    ],
)
def test_a_format_is_told_by_its_tensors(tmp_path: Path, tensors: dict[str, Tensor], evidence: str, name: str) -> None:
    message = refusal(write_folder(tmp_path, tensors))
    assert "model.safetensors holds" in message
    assert evidence in message
    assert name in message
    assert "is not served: use " in message or "is not served: save " in message


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "exl2", "bits": 4}, "EXL2"),
        ({"quant_method": "exl3"}, "EXL3"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8"),
        ({"quant_method": "fbgemm_fp8"}, "FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "torchao"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "quip_sharp"}, "QuIP#"),
        ({"quant_method": "vptq"}, "a quantisation of another kind"),
    ],
)
def test_a_format_is_told_by_its_declared_method(tmp_path: Path, quantization: dict[str, Any], name: str) -> None:
    message = refusal(write_folder(tmp_path, module(weight=HALVES), quantization))
    assert f"config.json quantization_config says quant_method {quantization['quant_method']}" in message
    assert name in message
    assert "is not served: use " in message


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pytorch_model.bin", "holds only pickled weights (pytorch_model.bin)"),
        ("model.onnx", "holds the model as ONNX (model.onnx)"),
        ("onnx/model_q4.onnx", "holds the model as ONNX (onnx/model_q4.onnx)"),
        ("openvino_model.xml", "holds the model as OpenVINO (openvino_model.xml)"),
        ("tf_model.h5", "holds the model as TensorFlow or Keras (tf_model.h5)"),
        ("flax_model.msgpack", "holds the model as Flax (flax_model.msgpack)"),
    ],
)
def test_a_folder_of_another_kind_is_named(tmp_path: Path, file: str, said: str) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "model.safetensors").unlink()
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).touch()
    message = refusal(folder)
    assert said in message
    assert "safetensors" in message.partition(said)[2]


def test_files_of_another_kind_beside_safetensors_do_no_harm(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, module(weight=HALVES))
    for name in ("model.onnx", "pytorch_model.bin", "tf_model.h5"):
        (folder / name).touch()
    assert open_checkpoint(folder).report.format == "safetensors"
