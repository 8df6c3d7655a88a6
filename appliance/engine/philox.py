"""Random numbers as a pure function of what is drawn: Philox4x32-10 in torch int64 arithmetic.

There is no generator and no state, so batching, preemption, graphs and the order of draws cannot change a number.
Knows the counter layout that a Triton twin has to repeat; knows nothing of logits or requests.

The 64-bit key is the request's seed, low word first. The counter's words are (output position, child index, lane, 0). A
lane is an independent stream at the same position, for consumers that draw more than once for one token.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), and Random123's `kat_vectors`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLING_LANE = 0
"""The lane of the draw that chooses the next token."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
# The key grows by the golden ratio and sqrt(3) - 1 each round; [round, key word, 1].
_KEY_STEPS = torch.arange(10).view(10, 1, 1) * torch.tensor([[0x9E3779B9], [0xBB67AE85]])


def philox4x32(key: Tensor, counter: Tensor) -> Tensor:
    """Ten rounds of Philox4x32.

    key is int64 [2, n], counter int64 [4, n], every element a word in 0..2**32-1, on the CPU. Returns four words of the
    same kind for each column, int64 [4, n].
    """
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _KEY_STEPS) & _WORD:
        # A product of two words wraps into the sign bit of int64; masking after the arithmetic shift undoes that.
        product = even * _MULTIPLIERS
        even = (product >> 32 & _WORD).flip(0) ^ odd ^ round_key
        odd = (product & _WORD).flip(0)
    return torch.stack((even, odd), dim=1).view(4, -1)


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], child_indices: Sequence[int], lane: int = SAMPLING_LANE
) -> list[float]:
    """One number in [0, 1), a multiple of 2**-32, for each (seed, output position, child index).

    Seeds are taken modulo 2**64, so negative ones are welcome; the other arguments must lie in 0..2**32-1.
    """
    key = torch.tensor([[seed & _WORD for seed in seeds], [seed >> 32 & _WORD for seed in seeds]])
    rest = [[lane] * len(seeds), [0] * len(seeds)]
    words = philox4x32(key, torch.tensor([list(positions), list(child_indices), *rest]))
    return [word * 2.0**-32 for word in words[0].tolist()]
