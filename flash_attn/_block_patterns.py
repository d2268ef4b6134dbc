# SPDX-License-Identifier: BSD-3-Clause
"""The patterns of `BlockMask`: its constructors that need no list of blocks, only a rule.

All rules are exact, element by element: a block that a rule cuts gets a bit tile. Query i stands at
key p = i + seqlen_k - seqlen_q (bottom-right alignment, as causal and windows everywhere). The
patterns that papers state in blocks (strided, fixed, dilated, butterfly) count in units of the
longer side of block_size: query unit u = p // unit, key unit c = j // unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._block_arguments import (
    LONGEST,
    block_pair,
    flag,
    int_tensor,
    integer,
    integers,
    is_int,
    with_rank,
)
from ._block_regions import Blocks, Equal, Grid, Intervals, Lines, Predicate, Region, Units

_Size = int | tuple[int, int]
_Device = torch.device | str | int | None


class Patterns:
    """Mixed into BlockMask, whose `_from_region` makes the mask.

    The mask is for calls with seqlen_q queries and seqlen_k keys. Kernels like blocks of 64 and
    128. A call's own causal=True costs less than a mask that is causal, and means the same. Every
    constructor raises TypeError for what is no int (or bool, or tensor), and ValueError for values
    out of range, by name.
    """

    __slots__ = ()

    @classmethod
    def from_predicate(
        cls,
        predicate,
        batch: int | None,
        heads: int | None,
        seqlen_q: int,
        seqlen_k: int,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """Makes a mask from a function of the indices, looked at in every block.

        Work is that of all elements, memory that of the blocks: a block at a time, never seqlen_q x
        seqlen_k at once.

        Args:
            predicate: function (b, h, q, k) -> bool tensor, True is visible. It gets int64 tensors
                of shapes that broadcast, and returns what broadcasts to their common shape.
            batch: None where all batch entries share the mask, else their number.
            heads: likewise.
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives, and of the tensors that predicate gets;
                default: torch's default device.
        Returns:
            The mask.
        Raises:
            TypeError: predicate cannot be called, or returns no bool tensor; numbers that are none.
            ValueError: lengths or block sizes out of range; a result that does not broadcast.
        """
        if not callable(predicate):
            raise TypeError(
                f"flash_attn: predicate must be a function, got {type(predicate).__name__}"
            )
        batch, heads = (
            1 if number is None else integer(name, number, 0)
            for name, number in (("batch", batch), ("heads", heads))
        )
        grid = _grid(seqlen_q, seqlen_k, block_size, device, batch, heads)
        return cls._from_region(Predicate(predicate), grid)

    @classmethod
    def sliding_window(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window: int | tuple[int, int],
        *,
        causal: bool = False,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """Query i sees p - left <= j <= p + right: `window_size` as a mask.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            window: (left, right) in keys, -1 for unlimited; one int for both sides.
            causal: hides keys after the bottom-right diagonal, j > p.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: Longformer, https://arxiv.org/abs/2004.05150
        """
        grid = _grid(seqlen_q, seqlen_k, block_size, device)
        return cls._from_region(_with_causal(_window(window, grid), causal, grid), grid)

    @classmethod
    def sink_window(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        sinks: int,
        window: int,
        *,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """Causal; query i sees the first keys, j < sinks, and the last ones, j >= p - window.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            sinks: number of keys that all see.
            window: keys seen before the query's own.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: StreamingLLM, https://arxiv.org/abs/2309.17453
        """
        grid = _grid(seqlen_q, seqlen_k, block_size, device)
        sinks, window = integer("sinks", sinks, 0), integer("window", window, 0)
        first = Lines(grid.range(grid.seqlen_k) < sinks, 1)
        return cls._from_region((first | _window((window, 0), grid)) & _causal(grid), grid)

    @classmethod
    def window_global(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window: int | tuple[int, int],
        global_positions: int | Sequence[int] | Tensor,
        *,
        causal: bool = False,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """A window, and positions that see all and are seen by all.

        Query i sees j where p - left <= j <= p + right, or j is global, or p is.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            window: (left, right) in keys, -1 for unlimited; one int for both sides.
            global_positions: positions among the keys; an int g stands for the first g.
            causal: hides keys after the bottom-right diagonal, j > p.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: Longformer, https://arxiv.org/abs/2004.05150, and BigBird,
            https://arxiv.org/abs/2007.14062
        """
        grid = _grid(seqlen_q, seqlen_k, block_size, device)
        keys = _flags("global_positions", global_positions, grid)
        places = grid.range(grid.seqlen_q) + grid.shift
        queries = torch.zeros(grid.seqlen_q, dtype=torch.bool, device=grid.device)
        inside = places >= 0
        queries[inside] = keys[places[inside]]
        region = _window(window, grid) | Lines(keys, 1) | Lines(queries, 0)
        return cls._from_region(_with_causal(region, causal, grid), grid)

    @classmethod
    def prefix_lm(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        prefix: int | Sequence[int] | Tensor,
        *,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """Causal, but for a prefix of keys that all see: j <= p or j < prefix.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            prefix: length of the prefix, or one for each batch entry.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: T5, https://arxiv.org/abs/1910.10683
        """
        lengths = integers("prefix", [prefix] if is_int(prefix) else prefix)
        grid = _grid(seqlen_q, seqlen_k, block_size, device, len(lengths))
        ends = torch.tensor(lengths, device=grid.device)[:, None, None].clamp(max=grid.seqlen_k)
        end = torch.maximum(_places(grid) + 1, ends).clamp(min=0)
        return cls._from_region(Intervals(torch.zeros_like(end), end), grid)

    @classmethod
    def documents(
        cls,
        lengths: Sequence[int] | Tensor | None = None,
        *,
        ids: Tensor | None = None,
        causal: bool = False,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """Several documents in one sequence, each seeing itself alone; seqlen_q = seqlen_k.

        Args:
            lengths: of the documents, one after another; the sequence is as long as their sum.
            ids: (seqlen,) or (batch, seqlen), int: the document of each position, in any order;
                negative: padding, that sees nothing and is not seen. Instead of lengths.
            causal: hides later keys, j > i.
            block_size: block_q and block_k, or one int for both.
            device: with ids, theirs.
        Source: FlexAttention's document masking, https://arxiv.org/abs/2412.05496
        """
        if (lengths is None) == (ids is None):
            raise ValueError(
                "flash_attn: documents takes one of lengths and ids, got "
                f"{'none' if ids is None else 'both'}"
            )
        if ids is None:
            counts = torch.tensor(integers("lengths", lengths), dtype=torch.int64)
            ids = torch.arange(len(counts)).repeat_interleave(counts)
        else:
            int_tensor("ids", ids)
            if ids.dim() not in (1, 2):
                raise ValueError(
                    "flash_attn: ids must have shape (seqlen,) or (batch, seqlen), got "
                    f"{tuple(ids.shape)}"
                )
            device = ids.device
        ids = ids.reshape(-1, ids.shape[-1]) if ids.numel() else ids.new_zeros(1, ids.shape[-1])
        grid = _grid(ids.shape[1], ids.shape[1], block_size, device, ids.shape[0])
        return cls._from_region(_with_causal(Equal(ids.to(grid.device)), causal, grid), grid)

    @classmethod
    def strided(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        stride: int,
        *,
        causal: bool = True,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """In units: the nearest `stride` ones, |u - c| < stride, and every stride-th, (u - c) %
        stride == 0.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            stride: in units, at least 1.
            causal: hides keys after the bottom-right diagonal, j > p.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: Sparse Transformer, https://arxiv.org/abs/1904.10509
        """
        stride = integer("stride", stride, 1)

        def pattern(u: Tensor, c: Tensor) -> Tensor:
            return ((u - c).abs() < stride) | ((u - c) % stride == 0)

        return cls._from_units(pattern, seqlen_q, seqlen_k, causal, block_size, device)

    @classmethod
    def fixed(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        stride: int,
        summary: int = 1,
        *,
        causal: bool = True,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """In units: those of the same span of `stride` units, and the last `summary` of every span.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            stride: units of a span, at least 1.
            summary: units at a span's end that all see, 0 to stride.
            causal: hides keys after the bottom-right diagonal, j > p.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: Sparse Transformer, https://arxiv.org/abs/1904.10509
        """
        stride, summary = integer("stride", stride, 1), integer("summary", summary, 0)
        if summary > stride:
            raise ValueError(
                f"flash_attn: summary must lie in 0 to stride, {stride}, got {summary}"
            )

        def pattern(u: Tensor, c: Tensor) -> Tensor:
            span = torch.div(u, stride, rounding_mode="floor")
            return (span == c // stride) | (c % stride >= stride - summary)

        return cls._from_units(pattern, seqlen_q, seqlen_k, causal, block_size, device)

    @classmethod
    def dilated(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window: int,
        dilation: int,
        *,
        causal: bool = False,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """In units: `window` on each side, `dilation` apart: |u - c| <= window * dilation and (u -
        c) % dilation == 0.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            window: units seen on each side, beside the query's own.
            dilation: from one to the next, at least 1.
            causal: hides keys after the bottom-right diagonal, j > p.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: Longformer, https://arxiv.org/abs/2004.05150
        """
        window, dilation = integer("window", window, 0), integer("dilation", dilation, 1)

        def pattern(u: Tensor, c: Tensor) -> Tensor:
            return ((u - c).abs() <= window * dilation) & ((u - c) % dilation == 0)

        return cls._from_units(pattern, seqlen_q, seqlen_k, causal, block_size, device)

    @classmethod
    def butterfly(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        stride: int | None = None,
        global_units: int = 0,
        *,
        causal: bool = False,
        block_size: _Size = 128,
        device: _Device = None,
    ):
        """In units: flat butterfly, u == c or the two differ in one binary digit; log(n) units a
        row.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            stride: the largest difference, a power of two; default: any.
            global_units: the first units, that see all and are seen by all (in place of the paper's
                low-rank part).
            causal: hides keys after the bottom-right diagonal, j > p.
            block_size: block_q and block_k, or one int for both.
            device: where the mask is made and lives; default: torch's default device.
        Source: Pixelated Butterfly, https://arxiv.org/abs/2112.00029, the pattern of the first
            FlashAttention paper, https://arxiv.org/abs/2205.14135
        """
        if stride is not None:
            stride = integer("stride", stride, 1)
            if stride & (stride - 1):
                raise ValueError(f"flash_attn: stride must be a power of two, got {stride}")
        first = integer("global_units", global_units, 0)

        def pattern(u: Tensor, c: Tensor) -> Tensor:
            difference = u ^ c
            seen = (difference & (difference - 1)) == 0
            seen = seen & (u >= 0) & (difference <= (LONGEST if stride is None else stride))
            return seen | (u < first) | (c < first)

        return cls._from_units(pattern, seqlen_q, seqlen_k, causal, block_size, device)

    @classmethod
    def topk(
        cls,
        scores: Tensor,
        k: int,
        seqlen_q: int,
        seqlen_k: int,
        *,
        causal: bool = False,
        block_size: _Size = 128,
    ):
        """Per block row the k blocks with the largest scores; the earlier of two equal ones.

        Args:
            scores: (batch or 1, heads or 1, rows, columns), floating point, one a block; leading
                dimensions may be left out. -inf and NaN are never chosen.
            k: blocks of a row, at least 0; a row with fewer candidates gets those.
            seqlen_q: number of queries.
            seqlen_k: number of keys.
            causal: only blocks with something on or below the diagonal are candidates, and elements
                above it stay hidden.
            block_size: block_q and block_k, or one int for both.
        Returns:
            The mask, on the device of scores.
        Source: MoBA, https://arxiv.org/abs/2502.13189; MInference, https://arxiv.org/abs/2407.02490
        """
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            found = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"flash_attn: scores must be a floating-point tensor, got {found}")
        scores, k = with_rank(scores.detach(), 4, "scores"), integer("k", k, 0)
        grid = _grid(seqlen_q, seqlen_k, block_size, scores.device, *scores.shape[:2])
        if scores.shape[2:] != (grid.rows, grid.columns):
            raise ValueError(
                f"flash_attn: scores must have {grid.rows} rows and {grid.columns} columns of "
                f"blocks, got {tuple(scores.shape[2:])}"
            )
        lowest = float("-inf")
        scores = scores.masked_fill(scores.isnan(), lowest)
        if flag("causal", causal):
            scores = scores.masked_fill(~_causal(grid).blocks(grid)[0], lowest)
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
        region = Blocks(chosen & (scores > lowest), grid)
        return cls._from_region(_with_causal(region, causal, grid), grid)

    @classmethod
    def _from_units(cls, pattern, seqlen_q, seqlen_k, causal, block_size, device):
        grid = _grid(seqlen_q, seqlen_k, block_size, device)
        return cls._from_region(_with_causal(Units(pattern, grid), causal, grid), grid)


# ---- parts of the rules


def _grid(seqlen_q, seqlen_k, block_size, device, batch: int = 1, heads: int = 1) -> Grid:
    seqlen_q, seqlen_k = integer("seqlen_q", seqlen_q, 0), integer("seqlen_k", seqlen_k, 0)
    place = torch.get_default_device() if device is None else torch.device(device)
    return Grid(batch, heads, seqlen_q, seqlen_k, *block_pair(block_size), place)


def _places(grid: Grid) -> Tensor:
    """p of each query, (1, 1, seqlen_q)."""
    return (grid.range(grid.seqlen_q) + grid.shift)[None, None]


def _causal(grid: Grid) -> Region:
    end = (_places(grid) + 1).clamp(min=0)
    return Intervals(torch.zeros_like(end), end)


def _with_causal(region: Region, causal, grid: Grid) -> Region:
    return region & _causal(grid) if flag("causal", causal) else region


def _window(window, grid: Grid) -> Region:
    pair = (window, window) if is_int(window) else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"flash_attn: window must be an int or a pair (left, right) of ints, got {window!r}"
        )
    left, right = (integer("window", side, -1) for side in pair)
    places = _places(grid)
    first = torch.zeros_like(places) if left < 0 else (places - left).clamp(min=0)
    end = torch.full_like(places, grid.seqlen_k) if right < 0 else places + right + 1
    return Intervals(first, end.clamp(0, grid.seqlen_k))


def _flags(name: str, positions, grid: Grid) -> Tensor:
    """(seqlen_k,) bool: the keys that an int (the first ones) or a list of positions names."""
    if is_int(positions):
        return grid.range(grid.seqlen_k) < integer(name, positions, 0)
    places = integers(name, positions)
    if any(place >= grid.seqlen_k for place in places):
        raise ValueError(
            f"flash_attn: {name} must lie in 0 to {grid.seqlen_k - 1}, got {max(places)}"
        )
    flags = torch.zeros(grid.seqlen_k, dtype=torch.bool, device=grid.device)
    flags[torch.tensor(places, dtype=torch.int64, device=grid.device)] = True
    return flags
