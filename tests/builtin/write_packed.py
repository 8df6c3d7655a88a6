"""Writes a whole checkpoint with a real packer: auto-gptq's QuantLinear.pack or autoawq's WQLinear_GEMM.from_linear.

    python write_packed.py HF_FOLDER OUT CASE

Run in the environment of the dependency group `quantize`. HF_FOLDER holds a Llama in 16 bits in one safetensors file,
such as `python -m benchmarks.to_hf` makes; its linear layers are rounded to nearest, without calibration. OUT/model is
the checkpoint, with the file names and configuration of its packer. OUT/expected.safetensors holds, per module, what
the packer's own code makes of the file (`dequantized` [K, N], in float32, where nothing is rounded) and the zero points
the packer was given (`zeros` [G, N] uint8).
"""

# The packers live in an environment of their own.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.quantization.quantizer import Quantizer
from auto_gptq.utils.import_utils import dynamically_import_QuantLinear
from awq.models._config import AwqConfig
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS = 4
GROUP_SIZE = 32  # that of the built-in model's own blocks: rounded again, it still answers well
# Modules of a block with the same input, which therefore share an act-order.
INPUTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@dataclass(frozen=True)
class Case:
    packer: str
    symmetric: bool = False
    act_order: bool = False
    zero_points_of_zero: bool = False


CASES = {
    "gptq_symmetric": Case("gptq", symmetric=True),
    "gptq_asymmetric": Case("gptq", zero_points_of_zero=True),
    "gptq_act_order": Case("gptq", symmetric=True, act_order=True),
    "awq_gemm": Case("awq"),
}


@dataclass(frozen=True)
class Rounded:
    """A layer on the grid. linear: fp16 [N, K]; scales, zeros: float32 [N, G]; order: int32 [K], each row's group."""

    linear: torch.nn.Linear
    scales: Tensor
    zeros: Tensor
    order: Tensor


def round_to_nearest(weight: Tensor, symmetric: bool, rows: Tensor) -> Rounded:
    """Rounds a weight [N, K] in groups of `rows`, the K inputs in the order in which they fill the groups."""
    N, K = weight.shape
    groups = weight[:, rows].float().view(-1, GROUP_SIZE)
    quantizer = Quantizer()
    quantizer.configure(BITS, perchannel=True, sym=symmetric, mse=False)
    quantizer.find_params(groups, weight=True)
    quantizer.scale = quantizer.scale.half().float()  # as it will be stored
    linear = torch.nn.Linear(K, N, bias=False, dtype=torch.float16)
    linear.weight[:, rows] = quantizer.quantize(groups).view(N, K).half()
    order = torch.empty(K, dtype=torch.int32)
    order[rows] = torch.arange(K, dtype=torch.int32) // GROUP_SIZE
    return Rounded(linear, quantizer.scale.view(N, -1), quantizer.zero.view(N, -1), order)


def pack_gptq(rounded: Rounded, act_order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of the file, and the weight that auto-gptq computes with [K, N] float32."""
    # The class auto-gptq itself chooses, and computes with, on a CPU.
    linear_class = dynamically_import_QuantLinear(
        use_triton=False,
        desc_act=act_order,
        group_size=GROUP_SIZE,
        bits=BITS,
        disable_exllama=True,
        disable_exllamav2=True,
    )
    K = rounded.linear.in_features
    layer = linear_class(BITS, GROUP_SIZE, K, rounded.linear.out_features, bias=False)
    layer.pack(rounded.linear, rounded.scales, rounded.zeros, rounded.order)
    tensors = dict(layer.state_dict())
    # Multiplying by the identity is the only way to its weight, and takes minutes in fp16.
    return tensors, layer.float()(torch.eye(K))


def pack_awq(rounded: Rounded) -> tuple[dict[str, Tensor], Tensor]:
    """As `pack_gptq`, with autoawq."""
    layer = WQLinear_GEMM.from_linear(
        rounded.linear, BITS, GROUP_SIZE, scales=rounded.scales.t(), zeros=rounded.zeros.t()
    )
    dequantized = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), BITS, GROUP_SIZE)
    return dict(layer.state_dict()), dequantized


def without_negatives(weight: Tensor, block: int) -> Tensor:
    """`weight` with one group of one column made non-negative: of the words of zero points, another nibble per block.

    The zero point of such a group is 0, which the model as it is has nowhere.
    """
    weight = weight.clone()
    weight[9 * block, block * GROUP_SIZE : (block + 1) * GROUP_SIZE].abs_()
    return weight


def write(folder: Path, out: Path, case: Case) -> None:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    expected: dict[str, Tensor] = {}
    for block in range(config["num_hidden_layers"]):
        for names in INPUTS:
            modules = [f"model.layers.{block}.{name}" for name in names]
            weights = [tensors.pop(f"{module}.weight") for module in modules]
            if case.zero_points_of_zero and names == ("mlp.down_proj",):
                weights = [without_negatives(weight, block) for weight in weights]
            rows = torch.arange(weights[0].shape[1])
            if case.act_order:  # the largest first; calibrated, it would be those of the largest inputs
                rows = torch.cat(weights).float().norm(dim=0).argsort(descending=True, stable=True)
            for module, weight in zip(modules, weights, strict=True):
                rounded = round_to_nearest(weight, case.symmetric, rows)
                expected[f"{module}.zeros"] = rounded.zeros.t().to(torch.uint8).contiguous()
                parts, dequantized = pack_gptq(rounded, case.act_order) if case.packer == "gptq" else pack_awq(rounded)
                expected[f"{module}.dequantized"] = dequantized.contiguous()
                tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(expected, out / "expected.safetensors")
    model = out / "model"
    shutil.copytree(folder, model, ignore=shutil.ignore_patterns("*.safetensors"))
    quantization: dict[str, Any]
    if case.packer == "gptq":
        settings = BaseQuantizeConfig(bits=BITS, group_size=GROUP_SIZE, sym=case.symmetric, desc_act=case.act_order)
        settings.save_pretrained(str(model))
        quantization, file = settings.to_dict(), f"gptq_model-{BITS}bit-{GROUP_SIZE}g.safetensors"
    else:
        settings = AwqConfig(w_bit=BITS, q_group_size=GROUP_SIZE)
        quantization, file = settings.to_transformers_dict(), "model.safetensors"
    save_file(tensors, model / file, metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("case", choices=CASES)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # the packers work column by column, which more threads only slow down
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.folder, options.out, CASES[options.case])


if __name__ == "__main__":
    main()
