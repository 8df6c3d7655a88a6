"""The packed layout of the Triton W4A16 kernel, and which layers it takes. Knows no Triton.

    words[b, t, r, c] holds q[k, n] of k = 128 * b + r + 32 * j in bits 4 * j to 4 * j + 3, n = 128 * t + c, j = 0 to 3

One word tile [32, 128] is 8 KB in a row and feeds four products of 32 rows of K against four contiguous slices of the
activations; each slice lies in one group for groups of 32 and above. int16 words go from memory to the registers of a
matrix multiply without a change of element width, which is what lets Triton skip a round trip through shared memory.
K and N are padded to 128 with codes and scales of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from appliance.kernels.spec import AffineWeight, LinearSpec

TILE = 128
"""Rows of K in a k-block and columns of N in a tile."""
SYMMETRIC_ZERO = 8
"""The zero point of every symmetric 4-bit weight: it needs no offsets."""
ONE_GROUP = 0
"""group_size of a weight with one scale a column."""


def run_group_size(spec: LinearSpec) -> int | None:
    """Rows that share a scale as the kernel sees them: 32, 64, 128 or ONE_GROUP; None where the layer fits none.

    A group that is a multiple of 128 runs as groups of 128 with repeated scales.
    """
    if spec.group_size >= spec.K:
        return ONE_GROUP
    if spec.group_size in (32, 64):
        return spec.group_size
    return TILE if spec.group_size % TILE == 0 else None


@dataclass(frozen=True, slots=True)
class PackedW4:
    """One 4-bit layer: y[M, N] = x[M, K] @ W[K, N].

    words: [ceil(K / 128), ceil(N / 128), 32, 128] int16, see above.
    scales, offsets: [groups, padded N] float32 of W = scale * q + offset; offsets is None where it is -8 * scale.
    group_size: 32, 64, 128 or ONE_GROUP. perm: as in the canonical weight, the activation is permuted by the caller.
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    K: int
    N: int
    group_size: int
    perm: Tensor | None

    @property
    def nbytes(self) -> int:
        tensors = (self.words, self.scales, self.offsets, self.perm)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def pack_w4(weight: AffineWeight) -> PackedW4:
    """Pack a canonical weight of at most 4 bits whose spec `run_group_size` takes."""
    K, N = weight.codes.shape
    group_size = run_group_size(LinearSpec(K, N, 4, weight.group_size))
    assert group_size is not None, f"no group of {weight.group_size} is let through"
    k_blocks, n_tiles = -(-K // TILE), -(-N // TILE)
    codes = F.pad(weight.codes, (0, n_tiles * TILE - N, 0, k_blocks * TILE - K))
    nibbles = codes.view(k_blocks, 4, 32, n_tiles, TILE).int()
    words = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12

    groups = 1 if group_size == ONE_GROUP else k_blocks * TILE // group_size
    is_symmetric = torch.equal(weight.offsets, -SYMMETRIC_ZERO * weight.scales)
    return PackedW4(
        words=words.to(torch.int16).transpose(1, 2).contiguous(),
        scales=_pad_groups(weight.scales, weight.group_size, group_size, groups, n_tiles),
        offsets=None if is_symmetric else _pad_groups(weight.offsets, weight.group_size, group_size, groups, n_tiles),
        K=K,
        N=N,
        group_size=group_size,
        perm=weight.perm,
    )


def _pad_groups(values: Tensor, stored_size: int, run_size: int, groups: int, n_tiles: int) -> Tensor:
    """[G, N] float32 of the checkpoint's groups -> [groups, n_tiles * 128] of the kernel's."""
    if run_size not in (ONE_GROUP, stored_size):
        values = values.repeat_interleave(stored_size // run_size, 0)[:groups]
    return F.pad(values, (0, n_tiles * TILE - values.shape[1], 0, groups - values.shape[0])).contiguous()
