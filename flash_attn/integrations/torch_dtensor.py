# SPDX-License-Identifier: BSD-3-Clause
"""Sharding rules for torch.distributed.tensor.DTensor. Importing this module registers them.

    import flash_attn.integrations.torch_dtensor
    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v))
    out = flash_attn.flash_attn_func(q, k, v, causal=True)        # a DTensor, Shard(2)

Attention runs without communication on inputs sharded along

    the batch   dense calls; bias, slopes and block masks with a batch dimension likewise
    the heads   where the number of shards divides num_heads_k; dense and packed calls

and so does its backward pass; gradients of what the shards share come out as partial sums. Any
other placement is first redistributed to a replicated one. All tensor arguments must be DTensors,
cu_seqlens too (replicated). Dropout is refused: its mask counts the entries of the whole batch.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import _ops

# Positions of the operator `forward`'s tensors.
_CU_SEQLENS, _SEQUSED, _CACHE, _BIAS, _SLOPES, _SINKS = 3, 5, slice(6, 9), 9, 10, 11
_LISTS, _PHILOX, _TENSORS = range(12, 18), 19, 20


def _along(dim: int, tensor):
    """The sharding of a bias or list along its batch (0) or heads (1), which may have size 1."""
    return Replicate() if tensor.shape[dim] == 1 else Shard(dim)


def _slopes(dim: int, tensor):
    """Of ALiBi's slopes, (heads,) or (batch, heads), likewise."""
    dim = dim + tensor.ndim - 2
    return Shard(dim) if dim >= 0 else Replicate()


def _shared(dim: int, arguments) -> list:
    """Placements of all the operators' tensors after q, k and v; None where there is none."""
    placements = [None if x is None else Replicate() for x in arguments[3:_TENSORS]]

    def place(position, rule):
        if arguments[position] is not None:
            placements[position - 3] = rule(dim, arguments[position])

    for position in (_BIAS, *_LISTS):
        place(position, _along)
    place(_SLOPES, _slopes)
    place(_SINKS, lambda dim, _: Shard(0) if dim == 1 else Replicate())
    place(_SEQUSED, lambda dim, _: Shard(0) if dim == 0 else Replicate())
    return placements


def _dims(arguments) -> list[int]:
    """Along what a call may be sharded: 0 for the batch, 1 for the heads."""
    q, k, v = arguments[:3]
    if arguments[_PHILOX] is not None:
        return []
    packed = arguments[_CU_SEQLENS] is not None
    cached = any(x is not None for x in arguments[_CACHE])
    dims = [] if packed or cached else [0]
    # Only as they come: further splits of the heads might tear the groups that share a key head.
    shards = 1
    for size, *places in zip(q.mesh.shape, q.placements, k.placements, v.placements, strict=True):
        shards *= size if any(place.is_shard(q.ndim - 2) for place in places) else 1
    if shards > 1 and k.shape[-2] % shards == 0:
        dims.append(1)
    return dims


def _rows(dim: int, tensor):
    """Of q, k, v, out and gradients: (batch, seqlen, heads, width) or (total, heads, width)."""
    return Shard(0 if dim == 0 else tensor.ndim - 2)


def _stats(dim: int, q):
    """Of lse: (batch, heads, seqlen) or, packed, (heads, total)."""
    return Shard(dim if q.ndim == 4 else 0)


def _numbers(arguments, first: int) -> list:
    return [None] * (len(arguments) - first)


@register_sharding(_ops.forward)
def _forward(*arguments):
    q, k, v = arguments[:3]
    whole = [None if x is None else Replicate() for x in arguments[:_TENSORS]]
    rest = _numbers(arguments, _TENSORS)
    rules = [([Replicate()] * 2, whole + rest)]
    for dim in _dims(arguments):
        inputs = [*(_rows(dim, x) for x in (q, k, v)), *_shared(dim, arguments)]
        rules.append(([_rows(dim, q), _stats(dim, q)], inputs + rest))
    return rules


@register_sharding(_ops.backward)
def _backward(dout, dlse, q, k, v, out, lse, *others):
    # The others are the lengths, then what follows the cache's arguments in `forward`.
    arguments = (q, k, v, *others[:3], None, None, None, *others[3:])
    needs = others[-2]
    given = (dout, dlse, q, k, v, out, lse, *others[:14])
    whole = [None if x is None else Replicate() for x in given]
    rest = _numbers(others, 14)
    rules = [([Replicate()] * 6, whole + rest)]
    for dim in _dims(arguments):
        shared = _shared(dim, arguments)
        rows = [_rows(dim, x) for x in (q, k, v)]
        stats = _stats(dim, q)
        first = [rows[0], None if dlse is None else stats, *rows, rows[0], stats]
        inputs = first + shared[:3] + shared[6:]
        # What every shard used whole has a gradient to be summed.
        grads = rows + [Partial() if x == Replicate() else x for x in shared[6:9]]
        outputs = [x if needs >> bit & 1 else Replicate() for bit, x in enumerate(grads)]
        rules.append((outputs, inputs + rest))
    return rules


@register_sharding(_ops.delta)
def _delta(out, dout):
    dims = [1] if out.ndim == 3 else [0, 1]
    rules = [([_stats(dim, out)], [_rows(dim, out)] * 2) for dim in dims]
    return [([Replicate()], [Replicate()] * 2), *rules]


@register_sharding(_ops.rotary)
def _rotary(x, cos, sin, offsets, interleaved, per_row):
    tables, numbers = [Replicate()] * 2, [None] * 2
    return [
        ([Replicate()], [Replicate(), *tables, Replicate(), *numbers]),
        ([Shard(0)], [Shard(0), *tables, Shard(0), *numbers]),
        ([Shard(2)], [Shard(2), *tables, Replicate(), *numbers]),
    ]
