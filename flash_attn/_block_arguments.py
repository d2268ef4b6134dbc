# SPDX-License-Identifier: BSD-3-Clause
"""What the constructors of `BlockMask` refuse, each argument by its name."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

# No sequence is as long: a window is cut to it, a block is no larger, so positions plus either fit
# 32 bits.
LONGEST = 1 << 30


def is_int(x) -> bool:
    """Also numpy's."""
    return isinstance(x, (int, Integral)) and not isinstance(x, bool)


def integer(name: str, x, least: int) -> int:
    if not is_int(x):
        raise TypeError(f"flash_attn: {name} must be an int, got {type(x).__name__}")
    if not least <= x <= LONGEST:
        allowed = f">= {least}" if x < least else "at most 2**30"
        raise ValueError(f"flash_attn: {name} must be {allowed}, got {x}")
    return int(x)


def flag(name: str, x) -> bool:
    if not isinstance(x, bool):
        raise TypeError(f"flash_attn: {name} must be a bool, got {type(x).__name__}")
    return x


def int_tensor(name: str, x) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"flash_attn: {name} must be an int32 or int64 tensor, got {found}")


def integers(name: str, values) -> list[int]:
    """A list or a 1-D tensor of ints >= 0."""
    if isinstance(values, Tensor):
        int_tensor(name, values)
        if values.dim() != 1:
            raise ValueError(
                f"flash_attn: {name} must have one dimension, got shape {tuple(values.shape)}"
            )
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"flash_attn: {name} must be a list or a tensor of ints, got {type(values).__name__}"
        )
    return [integer(name, value, 0) for value in values]


def with_rank(tensor: Tensor, rank: int, name: str) -> Tensor:
    """Puts dimensions of size 1 in front; at least (rows,) for counts, (rows, columns) for
    blocks."""
    if not rank - 2 <= tensor.dim() <= rank:
        raise ValueError(
            f"flash_attn: {name} must have {rank - 2} to {rank} dimensions, got shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape))


def block_pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    pair = (block_size, block_size) if is_int(block_size) else block_size
    if not isinstance(pair, (tuple, list)) or not all(is_int(x) for x in pair):
        raise TypeError(
            f"flash_attn: block_size must be an int or a pair of ints, got {block_size!r}"
        )
    if len(pair) != 2 or not all(1 <= x <= LONGEST for x in pair):
        raise ValueError(
            f"flash_attn: block_size must be an int from 1 to 2**30 or a pair of them, got "
            f"{block_size!r}"
        )
    return int(pair[0]), int(pair[1])
