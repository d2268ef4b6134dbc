# SPDX-License-Identifier: BSD-3-Clause
"""BlockMask: which blocks of queries see which blocks of keys, as index lists and their transposes.

Block (a, b) covers queries a * block_q … and keys b * block_k …, counted from the top left, inside
each sequence. The kernels walk the lists, so a hidden block costs nothing; the backward pass walks
the transposed ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

# No sequence is as long: a window is cut to it, a block is no larger, so positions plus either fit
# 32 bits.
LONGEST = 1 << 30


class BlockMask:
    """A block-sparse mask; make one with `from_dense` or `from_indices`.

    Attributes:
        block_size: (block_q, block_k), in queries and keys.
        counts: (batch or 1, heads or 1, rows) int32, visible blocks of each block row.
        indices: (batch or 1, heads or 1, rows, width) int32, those blocks ascending, -1 at the end.
        counts_t: (batch or 1, heads or 1, columns) int32, the same seen from the block columns.
        indices_t: (batch or 1, heads or 1, columns, width_t) int32.
    """

    __slots__ = ("block_size", "counts", "indices", "counts_t", "indices_t")

    def __init__(
        self,
        block_size: tuple[int, int],
        counts: Tensor,
        indices: Tensor,
        counts_t: Tensor,
        indices_t: Tensor,
    ):
        self.block_size = block_size
        self.counts, self.indices = counts, indices
        self.counts_t, self.indices_t = counts_t, indices_t

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
        blocks = _with_rank(blocks, 4, "blocks")
        size = _block_pair(block_size)
        return cls(size, *_lists(blocks), *_lists(blocks.transpose(2, 3)))

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
        for name, tensor in (("counts", counts), ("indices", indices)):
            if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
                found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"flash_attn: {name} must be an int32 or int64 tensor, got {found}")
        if indices.dim() != counts.dim() + 1 or indices.shape[:-1] != counts.shape:
            raise ValueError(
                "flash_attn: indices must have the shape of counts and one dimension more, got "
                f"{tuple(indices.shape)} and counts {tuple(counts.shape)}"
            )
        size = _block_pair(block_size)
        counts, indices = _with_rank(counts, 3, "counts"), _with_rank(indices, 4, "indices")
        width = indices.shape[-1]
        columns = width if columns is None else _columns(columns)
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
                f"list's "
                f"count, got {int(indices[wrong][0])}"
            )
        places = torch.where(live, indices, columns).long()
        hits = torch.zeros(*counts.shape, columns + 1, dtype=torch.int32, device=indices.device)
        hits.scatter_add_(-1, places, torch.ones_like(places, dtype=torch.int32))
        hits = hits[..., :columns]
        if bool((hits > 1).any()):
            b, h, row, column = (int(x) for x in (hits > 1).nonzero()[0])
            raise ValueError(
                f"flash_attn: indices names block {column} twice in the list of batch {b}, head "
                f"{h}, "
                f"row {row}"
            )
        return cls.from_dense(hits > 0, size)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, heads or 1, rows, columns), in blocks."""
        return (*self.counts.shape, self.counts_t.shape[-1])

    @property
    def lists(self) -> tuple[Tensor | None, ...]:
        """As the operators take them: counts, indices, counts_t, indices_t, bits_index,
        bits_index_t, bits."""
        return self.counts, self.indices, self.counts_t, self.indices_t, None, None, None

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def density(self) -> float:
        """Visible blocks over all blocks; 0.0 when there are none. Synchronises on a GPU."""
        total = self.counts.numel() * self.counts_t.shape[-1]
        return int(self.counts.sum()) / total if total else 0.0

    def to_dense(self) -> Tensor:
        """One bool per block, (batch or 1, heads or 1, rows, columns)."""
        batch, heads, rows, columns = self.shape
        live = torch.arange(self.indices.shape[-1], device=self.device) < self.counts[..., None]
        places = torch.where(live, self.indices, columns).long()
        blocks = torch.zeros(batch, heads, rows, columns + 1, dtype=torch.bool, device=self.device)
        return blocks.scatter(-1, places, True)[..., :columns].contiguous()

    def to(self, device) -> BlockMask:
        """The same mask on another device."""
        return BlockMask(self.block_size, *(x.to(device) for x in self.lists[:4]))

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, "
            f"density={self.density:.3f}, device={str(self.device)!r})"
        )


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts (…, rows) and ascending lists (…, rows, longest), int32, padded with -1."""
    counts = blocks.sum(-1, dtype=torch.int32)
    width = int(counts.max()) if counts.numel() else 0
    # A stable sort puts the visible columns first, in their own order.
    order = torch.argsort(~blocks, dim=-1, stable=True)[..., :width].int()
    live = torch.arange(width, device=blocks.device) < counts[..., None]
    return counts, torch.where(live, order, -1)


def _with_rank(tensor: Tensor, rank: int, name: str) -> Tensor:
    """Puts dimensions of size 1 in front; at least (rows,) for counts, (rows, columns) for
    blocks."""
    if not rank - 2 <= tensor.dim() <= rank:
        raise ValueError(
            f"flash_attn: {name} must have {rank - 2} to {rank} dimensions, got shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape))


def _is_int(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _columns(columns) -> int:
    if not _is_int(columns):
        raise TypeError(f"flash_attn: columns must be an int, got {type(columns).__name__}")
    if columns < 0:
        raise ValueError(f"flash_attn: columns must be >= 0, got {columns}")
    return columns


def _block_pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    pair = (block_size, block_size) if _is_int(block_size) else block_size
    if not isinstance(pair, (tuple, list)) or not all(_is_int(x) for x in pair):
        raise TypeError(
            f"flash_attn: block_size must be an int or a pair of ints, got {block_size!r}"
        )
    if len(pair) != 2 or not all(1 <= x <= LONGEST for x in pair):
        raise ValueError(
            f"flash_attn: block_size must be an int from 1 to 2**30 or a pair of them, got "
            f"{block_size!r}"
        )
    return tuple(pair)
