"""What the gated delta rule must compute, token by token in plain float32.

The state S [Dk, Dv] of a head decays, forgets what it holds under a key in part, and takes the value up instead:
S = exp(decay) S;  S += k (beta (v - k S));  o = q S.  q and k are brought to length 1 first, q divided by sqrt(Dk).
Source: transformers 5.24 models/qwen3_5, torch_recurrent_gated_delta_rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence: o [T, Hv, Dv] and the state after it, of q, k [T, Hk, Dk], v [T, Hv, Dv], the log of what is left,
    decay [T, Hv], beta [T, Hv] and the state before, [Hv, Dk, Dv]. Value head h has the keys of head h * Hk / Hv.
    """
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q / q.shape[-1] ** 0.5, k))
    state = state.clone()
    outputs = []
    for t in range(len(v)):
        state = state * decay[t].float().exp()[:, None, None]
        held = (state * k[t].unsqueeze(-1)).sum(-2)
        change = (v[t].float() - held) * beta[t].float().unsqueeze(-1)
        state = state + k[t].unsqueeze(-1) * change.unsqueeze(-2)
        outputs.append((state * q[t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs), state
