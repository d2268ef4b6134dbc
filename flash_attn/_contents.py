# SPDX-License-Identifier: BSD-3-Clause
"""What stands inside lengths, tables and index lists: read on the host, refused by name.

The CPU's operators look for themselves before they compute. Here it is done where they cannot:

    before an append to a cache, for what only the attention after it would find
    for backend="reference", which reads lengths on the host anyway
    on a GPU in checked mode, FLASH_ATTN_CHECK=1, read at each call; it synchronises

The rules and their words are those of csrc/torch/fill_params.cpp and ops_cache.cpp. A sequence
whose row of the block table holds nothing but -1 pads the batch: its length means nothing.
"""

from __future__ import annotations

import os
from typing import NoReturn

import torch
from torch import Tensor

_INT32_MAX, _INT32_MIN = 2**31 - 1, -(2**31)


def checked() -> bool:
    """Whether FLASH_ATTN_CHECK asks for checks that synchronise."""
    return os.environ.get("FLASH_ATTN_CHECK", "") not in ("", "0")


def wanted(q: Tensor, reading: bool) -> bool:
    """Whether to look now: where the host reads anyway (`reading`), or in checked mode; never
    while tracing, when there is nothing to read."""
    return (
        not torch.compiler.is_compiling()
        and (reading or (q.device.type == "cuda" and checked()))
        and type(q) in (Tensor, torch.nn.Parameter)
        and q.device.type != "meta"
        and not torch._C._are_functorch_transforms_active()
    )


def attention(arguments: tuple) -> None:
    """Everything that the operator `forward` reads beside its floating tensors; its arguments."""
    q, k, _, *lengths_and_pages, bias = arguments[:10]
    longest_q, longest_k = lengths(q, k, *lengths_and_pages)
    if bias is not None:
        _reach(bias, longest_q, longest_k)
    counts, indices, counts_t, indices_t, bits_index, bits_index_t, bits = arguments[12:19]
    if counts is not None:
        rows, columns = counts.shape[2], counts_t.shape[2]
        _block_list(counts, indices, columns)
        _block_list(counts_t, indices_t, rows)
        if bits is not None:
            _bit_tiles(counts, bits_index, bits.shape[0])
            _bit_tiles(counts_t, bits_index_t, bits.shape[0])
        block_q, block_k = arguments[25:27]
        if longest_q > rows * block_q or longest_k > columns * block_k:
            _refuse(
                f"block_mask has {rows} rows and {columns} columns of blocks of ({block_q}, "
                f"{block_k}), too few for {longest_q} queries and {longest_k} keys"
            )


def lengths(
    q: Tensor,
    k: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    used: Tensor | None,
    leftpad: Tensor | None,
    index: Tensor | None,
    table: Tensor | None,
) -> tuple[int, int]:
    """Checks lengths, pages and cache entries; returns the longest lengths of queries and of
    keys."""
    cu_q, cu_k, used, leftpad, index = (
        None if x is None else x.tolist() for x in (cu_q, cu_k, used, leftpad, index)
    )
    paged = table is not None
    room = k.shape[1] * table.shape[1] if paged else k.shape[1]
    batch, longest_q = q.shape[0], q.shape[1]
    if cu_q is not None:
        batch, longest_q = len(cu_q) - 1, _cumulative("cu_seqlens_q", cu_q, q.shape[0])
    if cu_k is not None:
        _cumulative("cu_seqlens_k", cu_k, _INT32_MAX if paged else k.shape[0])
    if index is not None:
        _entries(index, k.shape[0])
    padding = _padding(table).tolist() if paged else [False] * batch
    live = [0] * batch
    for b in range(batch):
        if padding[b]:
            continue
        most = room if cu_k is None else cu_k[b + 1] - cu_k[b]
        if paged and most > room:
            _refuse(
                f"cu_seqlens_k gives sequence {b} {most} keys, block_table has pages for {room}"
            )
        live[b] = most if used is None else used[b]
        if not 0 <= live[b] <= most:
            _refuse(
                f"seqused_k[{b}] (cache_seqlens, with what is appended) must lie in 0 to {most}, "
                f"got {_text(live[b])}"
            )
        if leftpad is not None and leftpad[b] < 0:
            _refuse(f"leftpad_k[{b}] must not be negative, got {_text(leftpad[b])}")
    if paged:
        _pages(table, live, k)
    return longest_q, max(live, default=0)


def append(
    k_cache: Tensor,
    seqlen_new: int,
    cache_seqlens: Tensor,
    index: Tensor | None,
    table: Tensor | None,
) -> None:
    """Whether every slot exists that the operator `append_kv` would write."""
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    if index is not None:
        entries = index.tolist()
        _entries(entries, k_cache.shape[0])
        entries.sort()
        twice = next((a for a, b in zip(entries, entries[1:], strict=False) if a == b), None)
        if twice is not None:
            _refuse(
                "cache_batch_idx must name each cache entry once when keys are appended, got "
                f"{twice} twice"
            )
    ends = cache_seqlens.tolist()
    padding = [False] * len(ends) if table is None else _padding(table).tolist()
    for b, first in enumerate(ends):
        ends[b] = 0 if padding[b] else first + seqlen_new
        if not padding[b] and (first < 0 or ends[b] > capacity):
            _refuse(
                f"cache_seqlens[{b}] + seqlen_new must lie in 0 to {capacity} (the capacity of "
                f"k_cache), got {_text(first)} + {seqlen_new}"
            )
    if table is not None:
        _pages(table, ends, k_cache)


def positions(offsets: Tensor, count: int, rows: int) -> None:
    """Whether rotary tables of `rows` rows hold positions offsets[b] to offsets[b] + count - 1."""
    for b, first in enumerate(offsets.tolist() if count else ()):
        if first < 0 or first + count > rows:
            _refuse(
                f"rotary_cos and rotary_sin hold positions 0 to {rows - 1}, got {first} to "
                f"{first + count - 1} (cache_seqlens[{b}])"
            )


def without_padding(cache_seqlens: Tensor, table: Tensor) -> Tensor:
    """cache_seqlens, with 0 for the sequences that only pad the batch."""
    return cache_seqlens.masked_fill(_padding(table), 0)


def _padding(table: Tensor) -> Tensor:
    return (table == -1).all(1)


def _cumulative(name: str, values: list[int], rows: int) -> int:
    """The longest sequence."""
    steps = [b - a for a, b in zip(values, values[1:], strict=False)]
    if values[0] != 0 or values[-1] > rows or any(step < 0 for step in steps):
        shown = ", ".join(map(_text, values[:16])) + (", …" if len(values) > 16 else "")
        _refuse(
            f"{name} must start at 0, not decrease and end at no more than the {rows} rows, got "
            f"[{shown}]"
        )
    return max(steps, default=0)


def _entries(index: list[int], entries: int) -> None:
    for b, entry in enumerate(index):
        if not 0 <= entry < entries:
            _refuse(f"cache_batch_idx[{b}] must lie in 0 to {entries - 1}, got {_text(entry)}")


def _pages(table: Tensor, live: list[int], pages: Tensor) -> None:
    """Pages that hold slots [0, live[b]) exist, or are -1. In torch: tables may be large."""
    num_pages, size = pages.shape[:2]
    ends = torch.tensor([-(-length // size) for length in live], device=table.device)
    used = torch.arange(table.shape[1], device=table.device) < ends[:, None]
    wrong = (used & ((table < -1) | (table >= num_pages))).nonzero()
    if len(wrong):
        b, column = wrong[0].tolist()
        _refuse(
            f"block_table[{b}, {column}] must lie in 0 to {num_pages - 1}, or be -1 for no page, "
            f"got {_text(int(table[b, column]))}"
        )


def _reach(bias: Tensor, longest_q: int, longest_k: int) -> None:
    rows, columns = bias.shape[2:]
    if (rows != 1 and rows < longest_q) or (columns != 1 and columns < longest_k):
        _refuse(
            f"attn_bias must reach the longest sequences, {longest_q} queries and {longest_k} "
            f"keys, or be 1 there, got shape {tuple(bias.shape)}"
        )


def _block_list(counts: Tensor, indices: Tensor, columns: int) -> None:
    width = indices.shape[-1]
    wrong = (counts < 0) | (counts > width)
    if bool(wrong.any()):
        _refuse(
            f"block_mask's counts must lie in 0 to {width} (the width of its indices), got "
            f"{int(counts[wrong][0])}"
        )
    live = torch.arange(width, device=counts.device) < counts[..., None]
    before = torch.nn.functional.pad(indices[..., :-1], (1, 0), value=-1) if width else indices
    wrong = live & ((indices <= before) | (indices >= columns))
    if bool(wrong.any()):
        _refuse(
            f"block_mask's indices must ascend within 0 to {columns - 1}, got "
            f"{int(indices[wrong][0])} after {int(before[wrong][0])}"
        )


def _bit_tiles(counts: Tensor, bits_index: Tensor, tiles: int) -> None:
    live = torch.arange(bits_index.shape[-1], device=counts.device) < counts[..., None]
    wrong = live & ((bits_index < -1) | (bits_index >= tiles))
    if bool(wrong.any()):
        _refuse(
            f"block_mask's bits_index must lie in 0 to {tiles - 1}, or be -1 for a whole block, "
            f"got {int(bits_index[wrong][0])}"
        )


def _text(value: int) -> str:
    """int64 inputs come cut to int32, so its ends stand for all beyond."""
    if value == _INT32_MAX:
        return f"{value} or more"
    return f"{value} or less" if value == _INT32_MIN else str(value)


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"flash_attn: {message}")
