# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embedding by this package's own operator, under FlashAttention 2's name and signature."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks, _ops


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotates the first rotary_dim elements of each head to the row's position.

    Args:
        x: (batch, seqlen, num_heads, head_dim), or with cu_seqlens (total, num_heads, head_dim).
        cos: (positions, rotary_dim / 2), any floating dtype. Row p is used at position p.
        sin: as cos.
        seqlen_offsets: int, or (batch,) integers: the position of each sequence's first row.
        cu_seqlens: (batch + 1,) cumulative lengths of packed sequences. Rows past its end are taken
            to position 0.
        max_seqlen: not needed.
        interleaved: pairs elements (0, 1), (2, 3), …; otherwise the two halves of rotary_dim.
        inplace: write into x and return it.
        conjugate: rotate back.
    Returns:
        As x. Arithmetic is in fp32 (fp64 with fp64).
    Raises:
        ValueError: shapes, or tables with too few positions.  TypeError: dtypes.
    Not differentiable: `flash_attn.layers.rotary.apply_rotary_emb` is.
    """
    cos, sin = _tables(x, cos, sin, cu_seqlens)
    if conjugate:
        sin = -sin
    rows, offsets = _rows(x, seqlen_offsets, cu_seqlens, cos.shape[0])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = _ops.run(_ops.rotary, rows, cos, sin, offsets, bool(interleaved), True).view(x.shape)
    return x.copy_(out) if inplace else out


def _tables(x: Tensor, cos, sin, cu_seqlens) -> tuple[Tensor, Tensor]:
    rank, layout = (4, "(batch, seqlen, num_heads, head_dim)")
    if cu_seqlens is not None:
        rank, layout = (3, "(total, num_heads, head_dim)")
    if not (isinstance(x, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        _checks.kind_error(("x", x), ("cos", cos), ("sin", sin))
    if x.dim() != rank:
        _checks.shape_error(f"x must have shape {layout}, got {_checks.shape(x)}")
    if cos.dim() != 2 or cos.shape != sin.shape or not 2 <= 2 * cos.shape[1] <= x.shape[-1]:
        _checks.shape_error(
            "cos and sin must have one shape (positions, rotary_dim / 2) with rotary_dim from 2 to "
            f"head_dim = {x.shape[-1]}, got {_checks.shape(cos)} and {_checks.shape(sin)}"
        )
    if cos.device != x.device or sin.device != x.device:
        _checks.shape_error(
            f"cos and sin must be on x's device, {x.device}, got {cos.device} and {sin.device}"
        )
    if cos.dtype != sin.dtype or cos.dtype not in (x.dtype, torch.float32):
        cos, sin = cos.float(), sin.float()
    return cos, sin


def _rows(x, seqlen_offsets, cu_seqlens, positions: int) -> tuple[Tensor, Tensor]:
    """x as the operator takes it, and the position of each of its batch entries."""
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        if isinstance(seqlen_offsets, Tensor):
            return x, _checks.per_batch("seqlen_offsets", seqlen_offsets, x, batch)
        _host_offset(seqlen_offsets)
        if seqlen_offsets + seqlen > positions:
            _checks.shape_error(
                f"cos must hold a row for each position up to seqlen_offsets + seqlen = "
                f"{seqlen_offsets + seqlen}, got {positions}"
            )
        return x, torch.full((batch,), seqlen_offsets, dtype=torch.int32, device=x.device)
    # Packed: each row is a batch entry of length 1 with a position of its own.
    ends = _checks.cu_seqlens("cu_seqlens", cu_seqlens, x)
    row = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    sequence = torch.searchsorted(ends[1:], row, right=True).clamp_(max=max(len(ends) - 2, 0))
    place = row - ends[sequence]
    if isinstance(seqlen_offsets, Tensor):
        offsets = _checks.per_batch("seqlen_offsets", seqlen_offsets, x, len(ends) - 1)
        place = place + offsets[sequence]
    else:
        _host_offset(seqlen_offsets)
        place = place + seqlen_offsets
    return x[:, None], place.masked_fill(row >= ends[-1], 0)


def _host_offset(value) -> None:
    if not _checks.whole(value):
        raise TypeError(
            "flash_attn: seqlen_offsets must be an int or an int32 or int64 tensor, got "
            f"{type(value).__name__}"
        )
    if value < 0:
        _checks.shape_error(f"seqlen_offsets must be >= 0, got {value}")
