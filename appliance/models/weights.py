"""Reads a model's layers out of a checkpoint, checks their shapes and packs them for the planned kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.kernels.dense import DenseLinear
from appliance.kernels.spec import LinearKernel, LinearSpec, Target
from appliance.models.tensor_names import LM_HEAD, TensorNames
from appliance.quant.checkpoint import Checkpoint, check_matrix
from appliance.quant.linear import PlannedLinear, spec_of
from appliance.quant.planner import LinearPlanner
from appliance.quant.weight import QuantizedWeight, concatenate


class FusedLinear:
    """Projections of one input whose outputs lie side by side: one matmul where the specs allow it, else several."""

    def __init__(self, parts: list[PlannedLinear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0](x, num_decode)
        return torch.cat([part(x, num_decode) for part in self.parts], -1)


class WeightReader:
    """Hands a model its weights one module at a time; its planner keeps count of what was packed how, and tests it."""

    def __init__(self, checkpoint: Checkpoint, planner: LinearPlanner, names: TensorNames) -> None:
        """names: where this checkpoint keeps what the methods are asked for by Llama's names."""
        self.checkpoint = checkpoint
        self.planner = planner
        self.target: Target = planner.target
        self._on_disk = names.resolve(checkpoint.has)
        self.other_bytes = 0
        self.other_parameters = 0
        """Numbers in norms and the embedding; one that is the output matrix too counts there."""

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(layer.nbytes for layer in self.planner.layers) + self.other_bytes

    @property
    def num_parameters(self) -> int:
        return sum(layer.plan.spec.K * layer.plan.spec.N for layer in self.planner.layers) + self.other_parameters

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Kernels of all layers, most used first within a layer, in order of first use."""
        return tuple(dict.fromkeys(name for layer in self.planner.layers for name in layer.plan.kernel_names))

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return self.checkpoint.has(self._on_disk(name))

    def norm(self, name: str, size: int, adds_one: bool = False) -> Tensor:
        """Weights [size] in the compute dtype; with adds_one one more, and in float32: 16 bits would round."""
        if not adds_one:
            return self._plain(name, (size,), self.target.dtype)
        return self._plain(name, (size,), torch.float32) + 1.0

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A small parameter of a given shape, in float32."""
        return self._plain(name, shape, torch.float32)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Tensor:
        return self._plain(name, (vocab_size, hidden_size), self.target.dtype)

    def lm_head(self, embed: Tensor, is_tied: bool) -> LinearKernel:
        """The output matrix. One on disk is used even if the config says tied (quantisers save it so); else the
        embedding, if tied. Raises CheckpointError if it is neither there nor tied.
        """
        weight: QuantizedWeight | Tensor = embed
        name = self._on_disk(LM_HEAD)
        if self.checkpoint.has_module(name):
            vocab_size, hidden_size = embed.shape
            weight = self._linear_weight(name, hidden_size, vocab_size)
        else:
            check_tied(is_tied)
            self.planner.check_weight(name, embed)
            self.other_parameters -= embed.numel()
        linear = self.planner.linear(name, weight, None)
        if isinstance(linear.decode, DenseLinear) and linear.decode.weight is embed:
            self.other_bytes -= embed.nbytes  # one tensor serves both ends
        return linear.decode

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
        """Projections `prefix.name` with their numbers of outputs, fused along N where specs and permutations agree.

        whole: name by which a checkpoint may hold them as one layer. whole_order: which of its outputs each of theirs
        is, None where they follow each other. head_orders: [head_dim] for projections whose outputs are heads, which
        dimension of the checkpoint's heads each of ours is. multiplier: of all outputs.
        """
        orders = {name: _per_head(order, outputs[name]) for name, order in (head_orders or {}).items()}
        if whole is not None and self.has(f"{prefix}.{whole}.weight"):
            rows, size = [], 0
            for name in outputs:
                rows.append(size + orders.get(name, torch.arange(outputs[name])))
                size += outputs[name]
            order = torch.cat(rows) if whole_order is None else whole_order[torch.cat(rows)]
            orders = {whole: order} if orders or whole_order is not None else {}
            outputs = {whole: size}
        names = [self._on_disk(f"{prefix}.{name}") for name in outputs]
        weights = [self._linear_weight(n, in_features, size) for n, size in zip(names, outputs.values(), strict=True)]
        biases = [self._bias(n, size, has_bias) for n, size in zip(names, outputs.values(), strict=True)]
        for i, name in enumerate(outputs):
            if name in orders:
                weights[i], biases[i] = _reorder(weights[i], biases[i], orders[name])
        if multiplier != 1.0:
            weights = [weight * multiplier for weight in weights]
            biases = [None if bias is None else bias * multiplier for bias in biases]
        merged = _merge(weights)
        if merged is None:
            parts = [self.planner.linear(n, w, b) for n, w, b in zip(names, weights, biases, strict=True)]
        else:
            bias = None
            if any(b is not None for b in biases):
                sizes = zip(biases, outputs.values(), strict=True)
                bias = torch.cat([torch.zeros(size, dtype=self.target.dtype) if b is None else b for b, size in sizes])
            parts = [self.planner.linear(" + ".join(names), merged, bias)]
        return FusedLinear(parts)

    def single(self, name: str, weight: Tensor) -> FusedLinear:
        """A projection whose weight [N, K] is at hand, without a bias: an expert's part of a stack."""
        name = self._on_disk(name)
        self.planner.check_weight(name, weight)
        return FusedLinear([self.planner.linear(name, weight, None)])

    def float32(self, outputs: Mapping[str, int], in_features: int) -> FusedLinear:
        """Modules with their numbers of outputs as one dense layer in float32, quantised on disk or not."""
        names = [self._on_disk(name) for name in outputs]
        weights = [self._linear_weight(n, in_features, size) for n, size in zip(names, outputs.values(), strict=True)]
        dense = [weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float() for weight in weights]
        return FusedLinear([self.planner.linear(" + ".join(names), torch.cat(dense), None, torch.float32)])

    def stack(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of several layers' weights as stored, a view of the file: nothing is counted."""
        name = self._on_disk(name)
        tensor = self.checkpoint.tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise CheckpointError(
                f"Tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}: 16- or 32-bit floats of shape "
                f"{shape}, as config.json says, were expected."
            )
        return tensor

    def _plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        name = self._on_disk(name)
        check_there(self.checkpoint, name)
        tensor = self.checkpoint.tensor(name)
        check_shape(name, tuple(tensor.shape), shape)
        self.planner.check(name, tensor)
        tensor = tensor.to(self.target.location, dtype).contiguous()
        self.other_bytes += tensor.nbytes
        self.other_parameters += tensor.numel()
        return tensor

    def _bias(self, module: str, size: int, is_expected: bool) -> Tensor | None:
        name = f"{module}.bias"
        if self.checkpoint.has(name):
            bias = self.checkpoint.tensor(name)
            if tuple(bias.shape) != (size,):
                raise CheckpointError(f"Tensor {name!r} has shape {tuple(bias.shape)}, expected ({size},).")
            self.planner.check(name, bias)
            # Old AutoGPTQ files carry an all-zero bias for layers that have none.
            return bias.to(self.target.dtype) if is_expected or bool(bias.any()) else None
        if is_expected:
            raise CheckpointError(f"The checkpoint has no tensor {name!r}, although config.json says there is a bias.")
        return None

    def _linear_weight(self, module: str, in_features: int, out_features: int) -> QuantizedWeight | Tensor:
        check_there(self.checkpoint, f"{module}.weight")
        weight = self.checkpoint.linear(module)
        if isinstance(weight, Tensor):
            check_matrix(weight, module)
        check_layer(module, spec_of(weight), in_features, out_features)
        self.planner.check_weight(module, weight)
        return weight


def check_there(checkpoint: Checkpoint, name: str) -> None:
    if not checkpoint.has(name):
        raise CheckpointError(f"The checkpoint has no tensor {name!r}: it is incomplete or of another architecture.")


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"Tensor {name!r} has shape {found}, config.json says it should be {expected}.")


def check_layer(module: str, found: LinearSpec, in_features: int, out_features: int) -> None:
    if (in_features, out_features) != (found.K, found.N):
        raise CheckpointError(
            f"Layer {module!r} has {found.K} inputs and {found.N} outputs, config.json says "
            f"{in_features} and {out_features}."
        )


def check_tied(is_tied: bool) -> None:
    """To be called where there is no lm_head."""
    if not is_tied:
        raise CheckpointError(
            "The checkpoint has no lm_head and config.json does not tie it to the embedding: "
            "a file is missing, or 'tie_word_embeddings' should be true."
        )


def _per_head(order: Tensor, size: int) -> Tensor:
    """[size]: `order` of one head's dimensions, for as many heads as have `size` outputs."""
    starts = torch.arange(0, size, len(order))
    return (starts.unsqueeze(1) + order).flatten()


def _reorder(
    weight: QuantizedWeight | Tensor, bias: Tensor | None, order: Tensor
) -> tuple[QuantizedWeight | Tensor, Tensor | None]:
    """A layer with its outputs in another order: output i is the layer's order[i]."""
    reordered = weight[order] if isinstance(weight, Tensor) else weight.select_outputs(order)
    return reordered, None if bias is None else bias[order]


def _merge(weights: list[QuantizedWeight | Tensor]) -> QuantizedWeight | Tensor | None:
    quantized = [w for w in weights if isinstance(w, QuantizedWeight)]
    dense = [w for w in weights if isinstance(w, Tensor)]
    if len(quantized) == len(weights):
        return concatenate(quantized) if len(quantized) > 1 else quantized[0]
    if len(dense) == len(weights):
        return torch.cat(dense) if len(dense) > 1 else dense[0]
    return None
