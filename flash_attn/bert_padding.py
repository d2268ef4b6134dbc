# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention 2's helpers between padded batches and packed rows, under its names.

Plain differentiable torch: they run on every device, in every dtype, under every transform. Their
gathers keep gradients apart by row, so a gradient costs one scatter and is the same in each run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x: (rows, ...) and (n,) int64 give (n, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros of (first_axis_dim, ...) with values (n, ...) as its rows `indices`, each at most
    once."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis` and x itself: both branches of a residual block."""
    return index_first_axis(x, indices), x


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of a padded batch that a mask names. Synchronises on a GPU.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integer, true where a row is real.
        unused_mask: (batch, seqlen), true where a row is packed though it is not used.
    Returns:
        The packed rows (total, ...), their indices in the flattened batch (total,) int64,
        cu_seqlens (batch + 1,) int32, the longest length (int), and the number of real rows of each
        sequence (batch,) int32.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"flash_attn: {name} must have shape {tuple(hidden_states.shape[:2])}, got "
                f"{tuple(mask.shape)}"
            )
    real = attention_mask.bool()
    packed = real if unused_mask is None else real | unused_mask.bool()
    lengths = packed.sum(-1, dtype=torch.int32)
    used = real.sum(-1, dtype=torch.int32)
    rows, indices, cu_seqlens, longest = _pack(hidden_states, packed, lengths)
    return rows, indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` where each row of the batch holds several sequences, one after another.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) integers: the lengths of the row's sequences, then
            zeros. [2, 3, 0, 0, 0, 0] is a sequence of 2, one of 3, and a row of padding.
    Returns:
        The packed rows (total, ...), their indices (total,) int64, cu_seqlens (sequences + 1,)
        int32, and the longest length (int).
    """
    ends = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=ends.device)
    lengths = attention_mask_in_length.flatten()
    return _pack(hidden_states, places < ends, lengths[lengths != 0])


def _pack(x: Tensor, mask: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = mask.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(x.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (total, ...) to (batch, seqlen, ...), zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def __getattr__(name: str):
    # Model files that were written for FlashAttention 2 import einops' functions from here.
    if name in ("rearrange", "repeat"):
        import einops

        return getattr(einops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
