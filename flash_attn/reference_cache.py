# SPDX-License-Identifier: BSD-3-Clause
"""The cache half of the oracle: rotary and append in plain torch, beside `reference.attention`.

Arguments are those of the operators `rotary` and `append_kv` (csrc/torch/schema.cpp). Both read
lengths and page numbers on the host; the caller has checked them (`_contents`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor, interleaved: bool, per_row: bool
) -> Tensor:
    """Rotates the first 2 * cos.shape[1] elements of x (batch, seqlen, heads, head_dim).

    Row i of batch b stands at position offsets[b] + i, or at offsets[b] when not per_row.
    `interleaved` pairs elements (0, 1), (2, 3), …; otherwise (0, n), (1, n + 1), … with n =
    cos.shape[1].
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    steps = torch.arange(x.shape[1], device=x.device)
    positions = offsets.long()[:, None] + (steps if per_row else torch.zeros_like(steps))
    cosine, sine = (table.to(dtype)[positions][:, :, None] for table in (cos, sin))
    width = 2 * cos.shape[1]
    turned, rest = x[..., :width].to(dtype), x[..., width:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., : width // 2], turned[..., width // 2 :]
    pair = first * cosine - second * sine, first * sine + second * cosine
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    interleaved: bool,
) -> None:
    """Writes k, v (batch, seqlen_new, heads_k, head_dim) into the caches at cache_seqlens[b] +
    i."""
    capacity = k_cache.shape[1]
    if block_table is not None:
        capacity *= block_table.shape[1]
    if cos is not None:
        k = rotary(k, cos, sin, cache_seqlens, interleaved, True)
    for batch, length in enumerate(cache_seqlens.tolist()):
        slots = torch.arange(length, length + k.shape[1], device=k.device)
        if block_table is None:
            entry = batch if cache_batch_idx is None else int(cache_batch_idx[batch])
            k_cache[entry, slots], v_cache[entry, slots] = k[batch], v[batch]
            continue
        size = k_cache.shape[1]
        slots = slots[slots < capacity]
        pages = block_table[batch].long()[slots // size]
        live = pages >= 0
        place = pages[live], (slots % size)[live]
        k_cache[place] = k[batch, : len(slots)][live]
        v_cache[place] = v[batch, : len(slots)][live]
