# SPDX-License-Identifier: BSD-3-Clause
"""BlockMask: which blocks of queries see which blocks of keys, as index lists and their transposes,
and for blocks that are partly visible the bits of their elements.

Block (a, b) covers queries a * block_q … and keys b * block_k …, counted from the top left, inside
each sequence. The kernels walk the lists, so a hidden block costs nothing; the backward pass walks
the transposed ones. Patterns: _block_patterns.py; how a rule becomes lists: _block_regions.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._block_arguments import LONGEST, block_pair, int_tensor, integer, with_rank
from ._block_patterns import Patterns
from ._block_regions import (
    HIDDEN,
    WHOLE,
    Grid,
    Predicate,
    Region,
    evaluate,
    lists,
    unpack,
    whole_state,
)

__all__ = ["LONGEST", "BlockMask"]

_PICTURE_ROWS, _PICTURE_COLUMNS = 24, 48  # of what print() draws


class BlockMask(Patterns):
    """A block-sparse mask. Make one with

        from_dense, from_indices          blocks that are given
        from_predicate                    a function of (batch, head, query, key)
        from_flex_attention               a mask of torch's FlexAttention
        sliding_window, window_global, sink_window, prefix_lm, documents,
        strided, fixed, dilated, butterfly, topk

    and give it to any function as `block_mask`. `print(mask)` draws it. A row of blocks that sees
    nothing gives out 0 and lse -inf, a column that nobody sees gradients of 0.

    Attributes:
        block_size: (block_q, block_k), in queries and keys.
        seqlens: (seqlen_q, seqlen_k) the mask was made for; None where only blocks were given, then
            any lengths with so many blocks will do. Not compared in packed calls.
        counts: (batch or 1, heads or 1, rows) int32, visible blocks of each block row.
        indices: (batch or 1, heads or 1, rows, width) int32, those blocks ascending, -1 at the end.
        counts_t: (batch or 1, heads or 1, columns) int32, the same seen from the block columns.
        indices_t: (batch or 1, heads or 1, columns, width_t) int32.
        bits_index: shape of indices, int32: the bit tile of a partly visible block, -1 of a whole
            one; None where all are whole.
        bits_index_t: shape of indices_t; None likewise.
        bits: (tiles, block_q, ceil(block_k / 32)) int32: bit j % 32 of word j / 32 of row i is set
            where query i of the block sees its key j. Equal blocks share a tile. None likewise.
    """

    __slots__ = (
        "block_size",
        "seqlens",
        "counts",
        "indices",
        "counts_t",
        "indices_t",
        "bits_index",
        "bits_index_t",
        "bits",
    )

    def __init__(
        self,
        block_size: tuple[int, int],
        counts: Tensor,
        indices: Tensor,
        counts_t: Tensor,
        indices_t: Tensor,
        bits_index: Tensor | None = None,
        bits_index_t: Tensor | None = None,
        bits: Tensor | None = None,
        seqlens: tuple[int, int] | None = None,
    ):
        self.block_size, self.seqlens = block_size, seqlens
        lists = counts, indices, counts_t, indices_t, bits_index, bits_index_t, bits
        if torch.is_inference_mode_enabled():  # a backward pass could not save its tensors
            with torch.inference_mode(False):
                lists = tuple(None if x is None else x.clone() for x in lists)
        self.counts, self.indices, self.counts_t, self.indices_t = lists[:4]
        self.bits_index, self.bits_index_t, self.bits = lists[4:]

    @classmethod
    def _from_state(cls, state: Tensor, bits: Tensor | None, size, seqlens=None) -> BlockMask:
        """state: as `evaluate` returns it."""
        counts, indices, tiles = lists(state)
        counts_t, indices_t, tiles_t = lists(state.transpose(2, 3))
        if bits is None or len(bits) == 0:
            tiles = tiles_t = bits = None
        return cls(size, counts, indices, counts_t, indices_t, tiles, tiles_t, bits, seqlens)

    @classmethod
    def _from_region(cls, region: Region, grid: Grid) -> BlockMask:
        size, seqlens = (grid.block_q, grid.block_k), (grid.seqlen_q, grid.seqlen_k)
        return cls._from_state(*evaluate(region, grid), size, seqlens)

    @classmethod
    def from_dense(cls, blocks: Tensor, block_size: int | tuple[int, int]) -> BlockMask:
        """Makes a mask from one bool per block.

        Args:
            blocks: (batch or 1, heads or 1, rows, columns), bool, True is visible; leading
                dimensions may be left out. rows = ceil(seqlen_q / block_q), columns = ceil(seqlen_k
                / block_k).
            block_size: block_q and block_k, or one int for both.
        Returns:
            The mask, on the device of `blocks`.
        Raises:
            TypeError: blocks is not a bool tensor, block_size not of ints.
            ValueError: the rank of blocks, or a block size outside 1 to 2**30.
        """
        if not isinstance(blocks, Tensor) or blocks.dtype != torch.bool:
            found = blocks.dtype if isinstance(blocks, Tensor) else type(blocks).__name__
            raise TypeError(f"flash_attn: blocks must be a bool tensor, got {found}")
        blocks = with_rank(blocks, 4, "blocks")
        size = block_pair(block_size)
        return cls._from_state(whole_state(blocks), None, size)

    @classmethod
    def from_indices(
        cls,
        counts: Tensor,
        indices: Tensor,
        block_size: int | tuple[int, int],
        columns: int | None = None,
    ) -> BlockMask:
        """Makes a mask from a list of visible blocks per block row.

        Args:
            counts: (batch or 1, heads or 1, rows), int, entries of each list; leading dimensions
                may be left out.
            indices: (batch or 1, heads or 1, rows, width), int, block columns in any order. Entries
                past the count are not read; -1 is the usual filler there.
            block_size: block_q and block_k, or one int for both.
            columns: number of block columns, ceil(seqlen_k / block_k). Default: the width of
                indices.
        Returns:
            The mask, on the device of `indices`, its lists sorted.
        Raises:
            TypeError: not integer tensors, block_size not of ints, columns no int.
            ValueError: shapes disagree, a count or a block out of range, a block twice in one list.
        """
        int_tensor("counts", counts)
        int_tensor("indices", indices)
        if indices.dim() != counts.dim() + 1 or indices.shape[:-1] != counts.shape:
            raise ValueError(
                "flash_attn: indices must have the shape of counts and one dimension more, got "
                f"{tuple(indices.shape)} and counts {tuple(counts.shape)}"
            )
        size = block_pair(block_size)
        counts, indices = with_rank(counts, 3, "counts"), with_rank(indices, 4, "indices")
        width = indices.shape[-1]
        columns = width if columns is None else integer("columns", columns, 0)
        counts = counts.to(indices.device)
        if counts.numel() and not bool(((counts >= 0) & (counts <= width)).all()):
            raise ValueError(
                f"flash_attn: counts must lie in 0 to {width} (the width of indices), "
                f"got {int(counts.min())} to {int(counts.max())}"
            )
        live = torch.arange(width, device=indices.device) < counts[..., None]
        wrong = live & ((indices < 0) | (indices >= columns))
        if bool(wrong.any()):
            raise ValueError(
                f"flash_attn: indices must lie in 0 to {columns - 1} (columns - 1) up to each "
                f"list's count, got {int(indices[wrong][0])}"
            )
        places = torch.where(live, indices, columns).long()
        hits = torch.zeros(*counts.shape, columns + 1, dtype=torch.int32, device=indices.device)
        hits.scatter_add_(-1, places, torch.ones_like(places, dtype=torch.int32))
        hits = hits[..., :columns]
        if bool((hits > 1).any()):
            b, h, row, column = (int(x) for x in (hits > 1).nonzero()[0])
            raise ValueError(
                f"flash_attn: indices names block {column} twice in the list of batch {b}, head "
                f"{h}, row {row}"
            )
        return cls.from_dense(hits > 0, size)

    @classmethod
    def from_flex_attention(cls, block_mask) -> BlockMask:
        """Makes a mask from one of torch.nn.attention.flex_attention.

        Its mask_mod is looked at in the partial blocks alone; those it lists as full are taken at
        its word. It is called with index tensors that broadcast, not one index at a time.

        Args:
            block_mask: a torch.nn.attention.flex_attention.BlockMask of batch or 1, heads or 1.
        Returns:
            The mask, of the same blocks and lengths, on the same device.
        Raises:
            TypeError: another object; a mask_mod that returns no bool tensor.
            ValueError: a mask_mod whose result does not broadcast.
        Source: https://arxiv.org/abs/2412.05496
        """
        for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE", "seq_lengths"):
            if not hasattr(block_mask, name):
                raise TypeError(
                    "flash_attn: block_mask must be a torch.nn.attention.flex_attention.BlockMask, "
                    f"got {type(block_mask).__name__}"
                )
        size = block_pair(block_mask.BLOCK_SIZE)
        counts = block_mask.kv_num_blocks
        batch, heads, _ = counts.shape
        grid = Grid(batch, heads, *block_mask.seq_lengths, *size, counts.device)
        some = _listed(counts, block_mask.kv_indices, grid)
        whole = torch.zeros_like(some)
        if block_mask.full_kv_num_blocks is not None:
            whole = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, grid)
        return cls._from_region(Predicate(block_mask.mask_mod, some | whole, whole), grid)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, heads or 1, rows, columns), in blocks."""
        return (*self.counts.shape, self.counts_t.shape[-1])

    @property
    def lists(self) -> tuple[Tensor | None, ...]:
        """As the operators take them: counts, indices, counts_t, indices_t, bits_index,
        bits_index_t, bits."""
        return (
            self.counts,
            self.indices,
            self.counts_t,
            self.indices_t,
            self.bits_index,
            self.bits_index_t,
            self.bits,
        )

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def density(self) -> float:
        """Visited blocks, whole or partial, over all blocks: what time goes with; 0.0 when there
        are none. Synchronises on a GPU."""
        total = self.counts.numel() * self.counts_t.shape[-1]
        return int(self.counts.sum()) / total if total else 0.0

    @property
    def element_density(self) -> float:
        """Visible elements over all elements, of whole blocks where the lengths are not known; 0.0
        when there are none. Synchronises on a GPU."""
        batch, heads, rows, columns = self.shape
        seqlens = self.seqlens or (rows * self.block_size[0], columns * self.block_size[1])
        total = batch * heads * seqlens[0] * seqlens[1]
        if total == 0:
            return 0.0
        state = self._state()
        heights, widths = (
            (length - torch.arange(count, device=self.device) * size).clamp(max=size)
            for length, count, size in zip(seqlens, (rows, columns), self.block_size, strict=True)
        )
        areas = (heights[:, None] * widths).expand(state.shape)
        seen = int(areas[state == WHOLE].sum())
        if self.bits is not None:
            lines = (torch.arange(size, device=self.device) for size in self.block_size)
            live_q, live_k = (
                line < extent[:, None]
                for line, extent in zip(lines, (heights, widths), strict=True)
            )
            step = max(1, (1 << 22) // (self.block_size[0] * self.block_size[1]))
            for places in (state >= 0).nonzero().split(step):
                b, h, row, column = places.unbind(1)
                tiles = unpack(self.bits[state[b, h, row, column].long()], self.block_size[1])
                seen += int((tiles & live_q[row][:, :, None] & live_k[column][:, None]).sum())
        return seen / total

    def to_dense(self) -> Tensor:
        """One bool per block, True where something of it is visible: (batch or 1, heads or 1, rows,
        columns)."""
        return self._state() != HIDDEN

    def to_elements(self) -> Tensor:
        """One bool per element, (batch or 1, heads or 1, seqlen_q, seqlen_k), of whole blocks where
        the lengths are not known. Costs memory of that size: for tests and small pictures."""
        _, _, rows, columns = self.shape
        seqlens = self.seqlens or (rows * self.block_size[0], columns * self.block_size[1])
        return self.visible(*(torch.arange(n, device=self.device) for n in seqlens))

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which of some queries see which of some keys; both 1-D, int64, inside the blocks.

        Returns (batch or 1, heads or 1, len(queries), len(keys)), bool.
        """
        (block_q, block_k), state = self.block_size, self._state()
        state = state[:, :, queries // block_q][..., keys // block_k]
        if self.bits is None:
            return state == WHOLE
        words = self.bits[
            state.clamp(min=0).long(),
            (queries % block_q)[:, None],
            (keys % block_k // 32)[None, :],
        ]
        bit = (words >> (keys % block_k % 32).int() & 1).bool()
        return (state == WHOLE) | ((state >= 0) & bit)

    def to(self, device) -> BlockMask:
        """The same mask on another device."""
        moved = (None if x is None else x.to(device) for x in self.lists)
        return BlockMask(self.block_size, *moved, self.seqlens)

    def _state(self) -> Tensor:
        """(batch or 1, heads or 1, rows, columns) int32: HIDDEN, WHOLE or a bit tile."""
        batch, heads, rows, columns = self.shape
        live = torch.arange(self.indices.shape[-1], device=self.device) < self.counts[..., None]
        places = torch.where(live, self.indices, columns).long()
        tiles = torch.full_like(places, WHOLE) if self.bits_index is None else self.bits_index
        room = (batch, heads, rows, columns + 1)
        state = torch.full(room, HIDDEN, dtype=torch.int32, device=self.device)
        return state.scatter(-1, places, tiles.int())[..., :columns].contiguous()

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, "
            f"seqlens={self.seqlens}, density={self.density:.3f}, device={str(self.device)!r})"
        )

    def __str__(self) -> str:
        """`repr` and a picture of the first batch entry and head: # wholly visible, + partly, .
        hidden; a character stands for several blocks where there are many."""
        batch, heads, rows, columns = self.shape
        lines = [repr(self)]
        if self.device.type == "meta" or 0 in self.shape:
            return lines[0]
        tall, wide = -(-rows // _PICTURE_ROWS), -(-columns // _PICTURE_COLUMNS)
        if batch * heads > 1:
            lines.append(f"batch entry 0, head 0 of {batch} x {heads}:")
        if tall * wide > 1:
            lines.append(f"a character is {tall} x {wide} blocks:")
        state = self._state()[0, 0].cpu()
        for begin in range(0, rows, tall):
            pieces = state[begin : begin + tall].split(wide, 1)
            lines.append("".join(_character(piece) for piece in pieces))
        return "\n".join(lines)


def _character(state: Tensor) -> str:
    if bool((state == WHOLE).all()):
        return "#"
    return "." if bool((state == HIDDEN).all()) else "+"


def _listed(counts: Tensor, indices: Tensor, grid: Grid) -> Tensor:
    """Lists of blocks as bools, (batch or 1, heads or 1, rows, columns); blocks past the keys are
    dropped."""
    live = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(live & (indices < grid.columns), indices, grid.columns).long()
    shape = (*counts.shape, grid.columns + 1)
    blocks = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    return blocks.scatter_(-1, places, True)[..., : grid.rows, : grid.columns]
