"""Log probabilities of chosen tokens and of the likeliest ones, out of rows of logits.

They are the model's own: log-softmax in float32 of its logits as they are, before penalties, biases and temperature.
Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from appliance.client import TokenLogprobs

FLOOR = -9999.0
"""Stands for minus infinity, which JSON has no word for."""

_ROWS = 64
"""Rows done at a time: float32 copies of a whole prompt's logits could be larger than the model."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """One entry a row of logits [len(token_ids), V]: that of its token, and the `num_top` likeliest.

    A likeliest token's own value is the first of its top ones, bit for bit. Rows that hold NaN or +inf give NaN.
    """
    found = []
    for start in range(0, len(token_ids), _ROWS):
        part = list(token_ids[start : start + _ROWS])
        scores = logits[start : start + _ROWS].float().log_softmax(dim=-1).clamp_(min=FLOOR)
        chosen = scores.gather(1, torch.tensor(part, device=scores.device).unsqueeze(1)).squeeze(1).tolist()
        values, indices = scores.topk(min(num_top, scores.shape[1]), dim=-1)
        for token_id, value, top_ids, top_values in zip(part, chosen, indices.tolist(), values.tolist(), strict=True):
            found.append(TokenLogprobs(token_id, value, tuple(zip(top_ids, top_values, strict=True))))
    return found
