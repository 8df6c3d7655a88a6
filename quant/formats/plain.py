"""Unquantised safetensors: 16- and 32-bit floats as they are, [N, K] in nn.Linear's orientation."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.spec import LinearSpec
from appliance.quant.declared import DeclaredQuantization
from appliance.quant.formats.compressed_tensors_config import read_compressed_config
from appliance.quant.report import FormatReport
from appliance.quant.tensor_files import TensorFiles
from appliance.quant.weight import QuantizedWeight

_FLOATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class PlainSource:
    """Reads plain tensors. Raises UnsupportedModelError for other dtypes, CheckpointError where weights are packed."""

    def __init__(self, files: TensorFiles, declared: DeclaredQuantization | None) -> None:
        if declared is not None and _says_packed(declared):
            raise CheckpointError(
                f"{declared.file} says quant_method {declared.method}, {declared.bits} bits, but no tensor ends in "
                ".qweight or .weight_packed: correct the configuration or download the model again"
            )
        self._files = files
        sizes = Counter[torch.dtype]()
        for name in files:
            if name.endswith(".weight"):
                dtype = files.dtype(name)
                if dtype not in _FLOATS:
                    raise UnsupportedModelError(
                        f"{name} in {files.file(name).name} has dtype {dtype} and no known quantisation: "
                        "use GPTQ, AWQ, GGUF or unquantised safetensors"
                    )
                sizes[dtype] += math.prod(files.shape(name))
        if not sizes:
            raise CheckpointError("the safetensors files hold no tensor named *.weight, a language model was expected")
        most = _FLOATS[sizes.most_common(1)[0][0]]
        self.report = FormatReport(
            format="safetensors",
            variant=most,
            bits=0,
            group_size=0,
            symmetric=None,
            act_order=False,
            evidence=(f"{len(files)} tensors, none packed, most weights {most}",),
        )

    def plain_names(self) -> list[str]:
        return list(self._files)

    def quantized_modules(self) -> list[str]:
        return []

    def spec(self, module: str) -> LinearSpec:
        raise KeyError(module)

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def quantized(self, module: str) -> QuantizedWeight:
        raise KeyError(module)

    def close(self) -> None:
        self._files.close()


def _says_packed(declared: DeclaredQuantization) -> bool:
    """Whether some weight is declared as packed: compressed-tensors may name none, only a quantised KV cache."""
    if "config_groups" in declared.raw:
        return bool(read_compressed_config(declared.file, declared.raw).schemes)
    return declared.method not in (None, "compressed-tensors") or declared.bits is not None
