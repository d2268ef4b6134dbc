# SPDX-License-Identifier: BSD-3-Clause
"""Sets of (query, key) pairs, and their block by block evaluation into what `BlockMask` holds.

A `Region` says of a pair whether it is in, and, cheaply, of a block whether it may hold such a pair
and whether it surely holds no other. `evaluate` then looks at the elements of the blocks between
these two answers, a bounded number at a time: memory is linear in the number of blocks, and work in
the elements of the blocks that a pattern cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

HIDDEN, WHOLE = -2, -1  # in a state, beside the numbers of bit tiles; they differ by 1


class Grid(NamedTuple):
    """What is cut into blocks; batch and heads are 1 where all share one pattern."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_k: int
    device: torch.device

    @property
    def rows(self) -> int:
        return -(-self.seqlen_q // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.seqlen_k // self.block_k)

    @property
    def shift(self) -> int:
        """Query i stands at key i + shift: bottom-right alignment."""
        return self.seqlen_k - self.seqlen_q

    def range(self, end: int) -> Tensor:
        return torch.arange(end, device=self.device)

    def edges(self, side: int) -> tuple[Tensor, Tensor]:
        """First and last query (side 0) or key (side 1) of each block row or column."""
        size, length = (self.block_q, self.block_k)[side], (self.seqlen_q, self.seqlen_k)[side]
        first = self.range(-(-length // size)) * size
        return first, (first + size - 1).clamp(max=length - 1)

    def extremes(self, values: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Least and largest of (…, seqlen) in each block: two of (…, blocks)."""
        first, _ = self.edges(side)
        size, length = (self.block_q, self.block_k)[side], values.shape[-1]
        if size >= length:
            return (values, values) if length == 0 else torch.aminmax(values, dim=-1, keepdim=True)
        places = self.range(len(first) * size).clamp(max=length - 1)
        return torch.aminmax(values[..., places].unflatten(-1, (len(first), size)), dim=-1)


class Region:
    """Base of the sets; `&` and `|` combine them."""

    def blocks(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """(some, all), bool, broadcastable to (batch, heads, rows, columns): whether a block may
        hold a pair of the set; whether it surely holds no other."""
        raise NotImplementedError

    def elements(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether pairs are in the set: indices of broadcastable shapes."""
        raise NotImplementedError

    def __and__(self, other: Region) -> Region:
        return Both(self, other, torch.logical_and)

    def __or__(self, other: Region) -> Region:
        return Both(self, other, torch.logical_or)


class Both(Region):
    """Two regions joined by a logical function that is monotone in both."""

    def __init__(self, left: Region, right: Region, join: Callable[[Tensor, Tensor], Tensor]):
        self.left, self.right, self.join = left, right, join

    def blocks(self, grid):
        pairs = zip(self.left.blocks(grid), self.right.blocks(grid), strict=True)
        some, whole = (self.join(a, b) for a, b in pairs)
        return some, whole

    def elements(self, b, h, q, k):
        return self.join(self.left.elements(b, h, q, k), self.right.elements(b, h, q, k))


class Predicate(Region):
    """Any function of the indices; with `some` and `whole` where the blocks are known."""

    def __init__(self, function, some: Tensor | None = None, whole: Tensor | None = None):
        self.function, self.some, self.whole = function, some, whole

    def blocks(self, grid):
        if self.some is not None:
            return self.some, self.whole
        shape = (1, 1, grid.rows, grid.columns)
        some = torch.ones(shape, dtype=torch.bool, device=grid.device)
        return some, torch.zeros_like(some)

    def elements(self, b, h, q, k):
        found = self.function(b, h, q, k)
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(f"flash_attn: the predicate must return a bool tensor, got {kind}")
        shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)
        try:
            return found.expand(shape)
        except RuntimeError:
            raise ValueError(
                "flash_attn: the predicate must return a shape that its indices broadcast to, "
                f"{tuple(shape)}, got {tuple(found.shape)}"
            ) from None


class Intervals(Region):
    """Query i with the keys first[…, i] <= j < end[…, i]; both (batch or 1, heads or 1,
    seqlen_q)."""

    def __init__(self, first: Tensor, end: Tensor):
        self.first, self.end = first, end

    def blocks(self, grid):
        (least_first, most_first), (least_end, most_end) = (
            grid.extremes(x, 0) for x in (self.first, self.end)
        )
        begin, last = grid.edges(1)
        some = (least_first[..., None] <= last) & (most_end[..., None] > begin)
        return some, (most_first[..., None] <= begin) & (least_end[..., None] > last)

    def elements(self, b, h, q, k):
        first, end = (_at(x, b, h, q) for x in (self.first, self.end))
        return (first <= k) & (k < end)


class Units(Region):
    """A pattern of square units: a function of the numbers of the query's and of the key's unit.

    A unit is as long as the longer side of a block, so a block lies in at most two units each way.
    """

    def __init__(self, pattern: Callable[[Tensor, Tensor], Tensor], grid: Grid):
        self.pattern, self.shift = pattern, grid.shift
        self.unit = max(grid.block_q, grid.block_k)

    def blocks(self, grid):
        rows = [self.of_query(x) for x in grid.edges(0)]
        columns = [x // self.unit for x in grid.edges(1)]
        corners = [self.pattern(r[:, None], c[None, :]) for r in rows for c in columns]
        some, whole = corners[0], corners[0]
        for corner in corners[1:]:
            some, whole = some | corner, whole & corner
        return some[None, None], whole[None, None]

    def elements(self, b, h, q, k):
        return self.pattern(self.of_query(q), k // self.unit)

    def of_query(self, q: Tensor) -> Tensor:
        return torch.div(q + self.shift, self.unit, rounding_mode="floor")


class Lines(Region):
    """Whole rows (side 0) or columns (side 1): flags (seqlen,), bool."""

    def __init__(self, flags: Tensor, side: int):
        self.flags, self.side = flags, side

    def blocks(self, grid):
        least, most = (x > 0 for x in grid.extremes(self.flags.byte(), self.side))
        if self.side == 0:
            least, most = least[:, None], most[:, None]
        shape = (1, 1, grid.rows, grid.columns)
        return most.expand(shape), least.expand(shape)

    def elements(self, b, h, q, k):
        return self.flags[q if self.side == 0 else k]


class Equal(Region):
    """Query i with key j where ids[…, i] == ids[…, j] >= 0; ids (batch or 1, seqlen)."""

    def __init__(self, ids: Tensor):
        self.ids = ids[:, None]

    def blocks(self, grid):
        (least_q, most_q), (least_k, most_k) = (grid.extremes(self.ids, side) for side in (0, 1))
        least_q, most_q = least_q[..., None], most_q[..., None]
        least_k, most_k = least_k[..., None, :], most_k[..., None, :]
        some = (least_q <= most_k) & (least_k <= most_q) & (most_q >= 0) & (most_k >= 0)
        whole = (least_q == most_q) & (least_k == most_k) & (least_q == least_k) & (least_q >= 0)
        return some, whole

    def elements(self, b, h, q, k):
        one, other = _at(self.ids, b, h, q), _at(self.ids, b, h, k)
        return (one == other) & (one >= 0)


class Blocks(Region):
    """Whole blocks: (batch or 1, heads or 1, rows, columns), bool."""

    def __init__(self, dense: Tensor, grid: Grid):
        self.dense, self.sizes = dense, (grid.block_q, grid.block_k)

    def blocks(self, grid):
        return self.dense, self.dense

    def elements(self, b, h, q, k):
        return _at(self.dense, b, h, q // self.sizes[0], k // self.sizes[1])


def _at(x: Tensor, b: Tensor, h: Tensor, *places: Tensor) -> Tensor:
    """x (batch or 1, heads or 1, …) at indices; a dimension of size 1 serves all."""
    b = b if x.shape[0] > 1 else torch.zeros_like(b)
    h = h if x.shape[1] > 1 else torch.zeros_like(h)
    return x[(b, h, *places)]


# ---- evaluation


def evaluate(region: Region, grid: Grid) -> tuple[Tensor, Tensor]:
    """The region in blocks: (state, bits).

    state: (batch, heads, rows, columns) int32, per block HIDDEN, WHOLE or the number of its bit
    tile. bits: (tiles, block_q, words) int32, each tile once. Positions past the lengths count as
    copies of the last one.
    """
    shape = (grid.batch, grid.heads, grid.rows, grid.columns)
    some, whole = region.blocks(grid)
    state = whole_state(whole.expand(shape))
    cut = (some & ~whole).expand(shape).nonzero()
    bits, numbers = _look(region, grid, cut)
    state[tuple(cut.unbind(1))] = numbers
    return state, bits


def whole_state(blocks: Tensor) -> Tensor:
    """The state of a mask of whole blocks: bool, True is visible."""
    return blocks.to(torch.int32, memory_format=torch.contiguous_format) + HIDDEN


def _look(region: Region, grid: Grid, cut: Tensor) -> tuple[Tensor, Tensor]:
    """The elements of the blocks `cut` (n, 4): their bit tiles and, per block, its state."""
    words = -(-grid.block_k // 32)
    area = grid.block_q * grid.block_k
    room = 1 << (20 if grid.device.type == "cpu" else 24)  # elements at a time
    step, lines = max(1, room // area), max(1, min(grid.block_q, room // grid.block_k))
    all_seen = torch.ones(grid.block_k, dtype=torch.bool, device=grid.device)
    all_seen = _pack(all_seen, words)
    kept, numbers, total = [], [], 0
    for blocks in cut.split(step) if len(cut) else ():
        parts = [
            _pack(_elements(region, grid, blocks, line, line + lines), words)
            for line in range(0, grid.block_q, lines)
        ]
        tiles = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        whole = (tiles == all_seen).flatten(1).all(1)
        mixed = ((tiles != 0).flatten(1).any(1) & ~whole).nonzero().flatten()
        tiles, number = unique_tiles(tiles[mixed])
        found = whole_state(whole)
        found[mixed] = number + total
        kept.append(tiles)
        numbers.append(found)
        total += len(tiles)
    if not kept:
        empty = torch.zeros(0, grid.block_q, words, dtype=torch.int32, device=grid.device)
        return empty, torch.zeros(0, dtype=torch.int32, device=grid.device)
    bits, number = unique_tiles(torch.cat(kept))
    found = torch.cat(numbers)
    if total:
        found = torch.where(found >= 0, number[found.clamp(min=0)], found)
    return bits, found


def _elements(region: Region, grid: Grid, blocks: Tensor, begin: int, end: int) -> Tensor:
    """Lines [begin, end), cut to the block, of some blocks: (n, lines, block_k), bool."""
    end = min(end, grid.block_q)
    b, h, row, column = (x[:, None, None] for x in blocks.unbind(1))
    q = row * grid.block_q + torch.arange(begin, end, device=grid.device)[:, None]
    k = column * grid.block_k + grid.range(grid.block_k)
    q, k = q.clamp(max=grid.seqlen_q - 1), k.clamp(max=grid.seqlen_k - 1)
    shape = (len(blocks), end - begin, grid.block_k)
    return region.elements(b, h, q, k).expand(shape)


def _pack(seen: Tensor, words: int) -> Tensor:
    """(…, n) bool -> (…, words) int32, element j being bit j % 32 of word j / 32."""
    room = torch.zeros(*seen.shape[:-1], words * 32, dtype=torch.bool, device=seen.device)
    room[..., : seen.shape[-1]] = seen
    # Eight bytes that are 0 or 1, times this, have bit i of byte i in the top byte.
    eights = room.view(torch.int64) * 0x0102040810204080 >> 56
    return eights.to(torch.uint8).view(torch.int32)


def unpack(bits: Tensor, block_k: int) -> Tensor:
    """(…, words) int32 -> (…, block_k) bool."""
    places = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> places) & 1).bool().flatten(-2)[..., :block_k]


def unique_tiles(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct tiles, per tile the int32 number of its like), found by a sum with fixed odd
    factors; in the event of a collision all are kept."""
    count = len(tiles)
    numbers = torch.arange(count, dtype=torch.int32, device=tiles.device)
    if count < 2:
        return tiles, numbers
    flat = tiles.flatten(1)
    factors = torch.arange(1, flat.shape[1] + 1, device=tiles.device)
    factors = factors * -7046029254386353131 ^ (factors * 6364136223846793005 >> 29) | 1
    sums = torch.zeros(count, dtype=torch.int64, device=tiles.device)
    step = max(1, (1 << 22) // flat.shape[1])
    for begin in range(0, count, step):
        sums[begin : begin + step] = (flat[begin : begin + step] * factors).sum(1)
    distinct, number = torch.unique(sums, return_inverse=True)
    first = torch.full((len(distinct),), count, dtype=torch.int64, device=tiles.device)
    first.scatter_reduce_(0, number, numbers.long(), "amin")
    kept = tiles[first]
    same = all(
        torch.equal(kept[number[begin : begin + step]], tiles[begin : begin + step])
        for begin in range(0, count, step)
    )
    return (kept, number.int()) if same else (tiles, numbers)


def lists(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A state's lines as lists: counts (…, rows), ascending indices (…, rows, longest) and the bit
    tiles beside them, int32, padded with -1."""
    lines = state.flatten(0, 2)
    seen = lines != HIDDEN
    counts = seen.sum(1, dtype=torch.int32)
    width = int(counts.max()) if counts.numel() else 0
    line, column = seen.nonzero(as_tuple=True)
    begin = counts.cumsum(0) - counts
    place = torch.arange(len(line), device=state.device) - begin[line]
    indices = torch.full((len(lines), width), -1, dtype=torch.int32, device=state.device)
    tiles = indices.clone()
    indices[line, place] = column.int()
    tiles[line, place] = lines[line, column]
    shape = state.shape[:3]
    return counts.view(shape), indices.view(*shape, width), tiles.view(*shape, width)
