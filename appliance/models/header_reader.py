"""Plans the layers of a model by their shapes, without reading a weight: for models that are not downloaded yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from appliance.kernels.spec import LinearSpec
from appliance.models.tensor_names import LM_HEAD
from appliance.models.weights import FusedLinear, WeightReader, check_layer, check_shape, check_there, check_tied
from appliance.quant.linear import spec_of


class HeaderReader(WeightReader):
    """A `WeightReader` that hands out layers without weights. Projections of one spec count as fused: that their
    permutations agree, which only the weights tell, is taken for granted.
    """

    def fused(
        self,
        prefix: str,
        outputs: Mapping[str, int],
        in_features: int,
        has_bias: bool,
        *,
        whole: str | None = None,
        whole_order: Tensor | None = None,
        head_orders: Mapping[str, Tensor] | None = None,
        multiplier: float = 1.0,
    ) -> FusedLinear:
        """Orders and the multiplier, which change no spec, are not looked at."""
        if whole is not None and self.has(f"{prefix}.{whole}.weight"):
            outputs = {whole: sum(outputs.values())}
        names = [self._on_disk(f"{prefix}.{name}") for name in outputs]
        specs = [self._spec(name, in_features, size) for name, size in zip(names, outputs.values(), strict=True)]
        if all(replace(spec, N=0) == replace(specs[0], N=0) for spec in specs):
            names, specs = [" + ".join(names)], [replace(specs[0], N=sum(spec.N for spec in specs))]
        for name, spec in zip(names, specs, strict=True):
            self.planner.plan(name, spec)
        return FusedLinear([])

    def single(self, name: str, weight: Tensor) -> FusedLinear:
        self.planner.plan(self._on_disk(name), spec_of(weight))
        return FusedLinear([])

    def float32(self, outputs: Mapping[str, int], in_features: int) -> FusedLinear:
        names = [self._on_disk(name) for name in outputs]
        for name, size in zip(names, outputs.values(), strict=True):
            self._spec(name, in_features, size)
        self.planner.plan(" + ".join(names), LinearSpec(in_features, sum(outputs.values()), 32), torch.float32)
        return FusedLinear([])

    def plan_lm_head(self, embed: Tensor, is_tied: bool) -> None:
        """What `lm_head` does, as far as it can be without a weight. embed: of `embedding`."""
        vocab_size, hidden_size = embed.shape
        name = self._on_disk(LM_HEAD)
        if self.checkpoint.has_module(name):
            self.planner.plan(name, self._spec(name, hidden_size, vocab_size))
            return
        check_tied(is_tied)
        self.other_parameters -= embed.numel()
        layer = self.planner.plan(name, LinearSpec(hidden_size, vocab_size, 8 * embed.element_size()))
        if layer.plan.decode.name == "dense":
            self.other_bytes -= layer.nbytes

    def _plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        name = self._on_disk(name)
        check_there(self.checkpoint, name)
        if len(shape) == 2:  # an embedding, which may be quantised
            spec = self.checkpoint.spec(name.removesuffix(".weight"))
            found: tuple[int, ...] = (spec.N, spec.K)
        else:
            found = tuple(self.checkpoint.tensor(name).shape)
        check_shape(name, found, shape)
        size = math.prod(shape)
        self.other_bytes += size * dtype.itemsize
        self.other_parameters += size
        return torch.empty(shape, dtype=dtype, device="meta")

    def _spec(self, module: str, in_features: int, out_features: int) -> LinearSpec:
        check_there(self.checkpoint, f"{module}.weight")
        spec = self.checkpoint.spec(module)
        check_layer(module, spec, in_features, out_features)
        return spec
