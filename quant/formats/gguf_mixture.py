"""What a GGUF file's metadata and tensors say of a mixture of experts, in the terms of config.json.

Keys: the `gguf` package's constants.py. That shares add up to one in some architectures and not in others is not in the
file: llama.cpp decides by architecture (its llama and qwen3moe: yes, qwen2moe: no).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from appliance.errors import CheckpointError, UnsupportedModelError

_DENSE = re.compile(r"blk\.([0-9]{1,4})\.ffn_gate\.weight")
_MIXTURES = ("llama", "qwen2moe", "qwen3moe")
# Values that mean what is served; absent does too. Gating function 1 is softmax.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
}


def mixture_fields(
    architecture: str, optional: Callable[[str], Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Fields of config.json; none where there are no experts. `optional` gives a value of the architecture, or None.

    Raises UnsupportedModelError for a mixture of another kind, CheckpointError naming a key or tensor that is missing.
    """
    count = optional("expert_count")
    if not count:
        return {}
    if architecture not in _MIXTURES:
        raise UnsupportedModelError(
            f"the GGUF file has {count} experts, {architecture} is served without: use another model"
        )
    for key, neutral in _NEUTRAL.items():
        if optional(key) is not None and optional(key) not in neutral:
            raise UnsupportedModelError(
                f"the GGUF file says {architecture}.{key} {optional(key)!r}, a mixture of experts of that kind is not "
                "served: use another model"
            )
    stacks = [name for name in shapes if name.endswith(".ffn_gate_exps.weight")]
    wrong = [name for name in stacks if len(shapes[name]) != 3 or shapes[name][0] != count]
    if wrong or not stacks:
        found = f"{wrong[0]} {list(shapes[wrong[0]])}" if wrong else "none"
        raise CheckpointError(
            f"the GGUF file should have {count} experts in tensors blk.N.ffn_gate_exps.weight [{count}, N, K], found "
            f"{found}: use a file that was converted anew"
        )
    fields: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": optional("expert_used_count"),
        "norm_topk_prob": architecture == "qwen3moe",
        "mlp_only_layers": [int(match[1]) for match in map(_DENSE.fullmatch, shapes) if match],
    }
    if fields["num_experts_per_tok"] is None:
        raise CheckpointError(f"GGUF metadata {architecture}.expert_used_count is missing, a number was expected")
    intermediate = shapes[stacks[0]][1]
    if architecture == "llama":
        return fields | {"intermediate_size": intermediate}
    shared = next((shape[0] for name, shape in shapes.items() if name.endswith(".ffn_gate_shexp.weight")), None)
    return fields | {"moe_intermediate_size": intermediate, "shared_expert_intermediate_size": shared}
