# SPDX-License-Identifier: BSD-3-Clause
"""Dropout's decisions in plain torch: Philox4x32 with 7 rounds, the same bits as the kernels'.

Written on int64 tensors, apart from csrc/core/philox.h, so that each tests the other. The key is
the seed; the counter is (i // 16 * 8 + i % 8, j // 32 * 8 + j % 8, batch * heads + head, offset).
Its eight 16-bit lanes serve rows i0 and i0 + 8 by columns j0, j0 + 8, j0 + 16, j0 + 24: lane 4 *
row + column.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


def keep_below(dropout_p: float) -> int:
    """The 16-bit threshold below which a lane keeps its probability; 65536 is no dropout.

    The realised rate is 1 - keep_below / 65536. At least one lane value is kept, so that the scale
    65536 / keep_below stays finite for a dropout_p that rounds to 1.
    """
    return max(1, round((1.0 - dropout_p) * 65536))


def realised_dropout(dropout_p: float) -> float:
    """The rate that 16-bit lanes give: exact in binary, so that every layer rounds it alike."""
    return 1.0 - keep_below(dropout_p) / 65536


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """(2,) int64, seed and offset, on the device; None is torch's default generator there."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)


def philox4x32(key: tuple[Tensor, Tensor], counter: Sequence[Tensor]) -> list[Tensor]:
    """Four 32-bit words, as int64 tensors, for 32-bit keys and counters that broadcast together."""
    words = list(torch.broadcast_tensors(*counter))
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2**64, which leaves both 32-bit halves right.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((second >> 32) & _MASK32) ^ words[1] ^ k0,
            second & _MASK32,
            ((first >> 32) & _MASK32) ^ words[3] ^ k1,
            first & _MASK32,
        ]
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return words


def keep_mask(
    philox: Tensor, threshold: int, batches: range, heads: int, rows: Tensor, columns: Tensor
) -> Tensor:
    """True where the probability of (batch, head, row, column) is kept, for every such place.

    Args:
        philox: (2,) int64, seed and offset.
        threshold: `keep_below`.
        batches: the batch indices wanted.
        heads: query heads of the whole problem.
        rows: (q_len,) int64 positions inside the sequence.
        columns: (k_len,) int64 slots.
    Returns:
        (len(batches), heads, q_len, k_len) bool.
    """
    device = rows.device
    seed, offset = philox[0], philox[1]
    key = seed & _MASK32, (seed >> 32) & _MASK32
    batch = torch.arange(batches.start, batches.stop, device=device)[:, None]
    plane = batch * heads + torch.arange(heads, device=device)
    i, j = rows[:, None], columns[None, :]
    counter = [
        i // 16 * 8 + i % 8,
        j // 32 * 8 + j % 8,
        plane[:, :, None, None] & _MASK32,
        offset & _MASK32,
    ]
    words = torch.stack(philox4x32(key, counter), -1)
    lane = (i % 16 // 8) * 4 + j % 32 // 8
    word = words.gather(-1, (lane // 2).expand(words.shape[:-1])[..., None])[..., 0]
    return ((word >> (lane % 2 * 16)) & 0xFFFF) < threshold
