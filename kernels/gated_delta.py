"""The gated delta rule (kernels/reference/gated_delta.py) in PyTorch, on any device: a step at a time for decodes, by
chunks for prefill, where what a chunk's tokens change in the state is the solution of one triangular system.

Of a chunk with keys K, values V, decay summed up to g_i, and the state S before it (Yang et al., Gated Delta Networks):
    A_ij = beta_i exp(g_i - g_j) k_i k_j for j < i;   (1 + A) U = beta (V - exp(g) K S)
    O = exp(g) Q S + [exp(g_i - g_j) q_i k_j for j <= i] U;   S' = exp(g_last) S + [exp(g_last - g) K]^T U
No exponent is positive, so nothing overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Rows that are solved for together."""
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Rows of a step, decodes first, one each, then prefill chunks, and the slots whose states they carry on.

    slots: [B] int64, on the device that computes. query_start_loc: B + 1 row offsets. has_state: False for a request's
    first chunk, whose slot holds someone else's leftovers. num_decode: how many of the B requests are decodes.
    """

    slots: Tensor
    query_start_loc: Sequence[int]
    has_state: Sequence[bool]
    num_decode: int


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, rows: StateRows
) -> Tensor:
    """o [T, Hv, Dv] float32 of q, k [T, Hk, Dk], v [T, Hv, Dv], decay and beta [T, Hv] float32; updates the states
    [slots, Hv, Dk, Dv] float32 of the rows' slots. A row's result does not depend on other requests' rows.
    """
    repeats = v.shape[1] // k.shape[1]
    q = _unit(q).mul_(q.shape[-1] ** -0.5).repeat_interleave(repeats, 1)
    k, v = _unit(k).repeat_interleave(repeats, 1), v.float()
    split, starts = rows.num_decode, rows.query_start_loc
    parts = []
    if split:
        slots = rows.slots[:split]
        state = states.index_select(0, slots)
        parts.append(_step(q[:split], k[:split], v[:split], decay[:split], beta[:split], state))
        states.index_copy_(0, slots, state)
    for i in range(split, len(rows.has_state)):
        slot = rows.slots[i : i + 1]
        state = states.index_select(0, slot)[0] if rows.has_state[i] else torch.zeros_like(states[0])
        for start in range(starts[i], starts[i + 1], CHUNK):
            part = slice(start, min(start + CHUNK, starts[i + 1]))
            by_head = [x[part].transpose(0, 1) for x in (q, k, v, decay, beta)]
            output, state = _chunk(by_head, state)
            parts.append(output.transpose(0, 1))
        states.index_copy_(0, slot, state.unsqueeze(0))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """o [B, H, Dv] of one row a request; state [B, H, Dk, Dv] is updated in place."""
    state.mul_(decay.exp()[..., None, None])
    change = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta.unsqueeze(-1)
    state.addcmul_(k.unsqueeze(-1), change.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def _chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """o [H, L, Dv] and the state after L rows of one request: q, k [H, L, Dk], v [H, L, Dv], decay, beta [H, L]."""
    q, k, v, decay, beta = inputs
    total = decay.cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    is_later = torch.ones(between.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    left = between.masked_fill_(is_later, -torch.inf).exp_()
    since_start, until_end = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    beta = beta.unsqueeze(-1)
    # The diagonal of the system is taken as ones.
    system = (k @ k.transpose(-1, -2)) * left * beta
    change = torch.linalg.solve_triangular(
        system, beta * (v - since_start * (k @ state)), upper=False, unitriangular=True
    )
    output = since_start * (q @ state) + ((q @ k.transpose(-1, -2)) * left) @ change
    return output, since_start[..., -1:, :] * state + (k * until_end).transpose(-1, -2) @ change
