# SPDX-License-Identifier: BSD-3-Clause
"""One decoding step over a cache: rotary, append, attention, three operators on one stream.

The caches are written in place by the operator `append_kv`, whose schema says so; everything else
is functional. Nothing here has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _contents, _ops, reference, reference_cache
from ._checks import shape, shape_error


def decode(
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad,
    block_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
    interleaved,
    alibi_slopes,
    attn_bias,
    learnable_sink,
    s_aux,
    block_mask,
    backend,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_with_kvcache` by position; returns (out, lse)."""
    paged = block_table is not None
    q, k, v = _new_tensors(q, k_cache, v_cache, k, v)
    layout = _checks.CACHE_PAGED if paged else _checks.CACHE
    q, keys, values = _checks.inputs(q, k_cache, v_cache, layout, cast=False)
    if k is None:  # nothing is written: copies of oddly strided caches will do
        k_cache, v_cache = keys, values
    batch = q.shape[0]
    floating = q, k_cache, v_cache, k, v, alibi_slopes, attn_bias, learnable_sink, s_aux
    _checks.no_gradient("flash_attn_with_kvcache", *floating, rotary_cos, rotary_sin)
    k_cache, v_cache, cache_batch_idx, block_table = _entries(
        q, k_cache, v_cache, cache_batch_idx, block_table
    )
    capacity = k_cache.shape[1] * (block_table.shape[1] if paged else 1)
    # Pages may reach further than any sequence ever will: then only the lengths say what is needed.
    slots = None if paged else capacity
    if k is not None:
        _check_new(q, k_cache, v_cache, k, v, cache_seqlens)
    new = 0 if k is None else k.shape[1]
    lengths = _lengths(cache_seqlens, q, batch, new, capacity)
    _check_rotary(q, k, rotary_cos, rotary_sin, cache_seqlens)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else _checks.scale(softmax_scale, q.dtype)
    left, right = _checks.window(window_size)
    right = 0 if _checks.flag("causal", causal) else right
    softcap = _checks.softcap(softcap, q.dtype)
    if cache_leftpad is not None:
        cache_leftpad = _checks.per_batch("cache_leftpad", cache_leftpad, q, batch)
    if alibi_slopes is not None:
        alibi_slopes = _checks.slopes(alibi_slopes, q, batch)
    if attn_bias is not None:
        attn_bias = _checks.bias(attn_bias, q, batch, q.shape[1], slots, True)
        if not paged and attn_bias.shape[3] > capacity and attn_bias.shape[3] > 1:
            attn_bias = attn_bias[..., :capacity]
    sinks = None
    if learnable_sink is not None or s_aux is not None:
        sinks = _checks.sinks(learnable_sink, s_aux, q)
    if block_mask is not None:
        _checks.block_mask(block_mask, q, batch, q.shape[1], slots)
    family = _checks.family(backend)
    _check_family(family, q.device)

    if rotary_cos is not None and paged and (family == _checks.REFERENCE or not q.is_cuda):
        # Else the length of a sequence that only pads the batch would have to be a position.
        lengths = _contents.without_padding(lengths, block_table)
    arguments = (
        q,
        k_cache,
        v_cache,
        None,
        None,
        lengths if k is None else lengths + new,
        cache_leftpad,
        cache_batch_idx,
        block_table,
        attn_bias,
        alibi_slopes,
        sinks,
        *((None,) * 7 if block_mask is None else block_mask.lists),
        None,
        scale,
        softcap,
        0.0,
        left,
        right,
        *((0, 0) if block_mask is None else block_mask.block_size),
        False,
        family,
    )
    return _step(arguments, block_mask, k, v, rotary_cos, rotary_sin, lengths, interleaved)


def _step(arguments, block_mask, k, v, cos, sin, lengths, interleaved) -> tuple[Tensor, Tensor]:
    """Looks into the lengths, rotates, appends, attends. `arguments` are those of the operator
    `forward`, its lengths with the new keys, q not rotated yet; `lengths` are those before."""
    q, k_cache, v_cache = arguments[:3]
    leftpad, index, table, bias = arguments[6:10]
    moving = max(arguments[23:25]) >= 0  # a window, so every query has a position of its own
    is_reference = arguments[-1] == _checks.REFERENCE
    # The CPU's operators find all that is wrong in the lengths before the append, but this.
    late = leftpad is not None or block_mask is not None or (table is not None and bias is not None)
    if _contents.wanted(q, is_reference or (k is not None and late and not q.is_cuda)):
        if k is not None:
            _contents.append(k_cache, k.shape[1], lengths, index, table)
        if cos is not None:
            rows = q.shape[1] if moving else min(q.shape[1], 1)
            _contents.positions(lengths, max(k.shape[1], rows), cos.shape[0])
        _by_our_names(_contents.attention, arguments)
    rotary, append, attend = _REFERENCE if is_reference else _KERNELS
    if cos is not None:
        q = _by_our_names(rotary, q, cos, sin, lengths, interleaved, moving)
        arguments = (q, *arguments[1:])
    if k is not None:
        append(k_cache, v_cache, k, v, cos, sin, lengths, index, table, interleaved)
    return _by_our_names(attend, arguments, block_mask)


def _by_our_names(function, *arguments):
    """Calls one of the parts; what it says of the lengths is said by the names of this call."""
    try:
        return function(*arguments)
    except ValueError as error:
        text = str(error).replace("seqused_k", "cache_seqlens").replace("offsets", "cache_seqlens")
        raise ValueError(text.replace("leftpad_k", "cache_leftpad")) from None


def _attend(arguments: tuple, block_mask) -> tuple[Tensor, Tensor]:
    return _ops.run(_ops.forward, *arguments)


def _attend_reference(arguments: tuple, block_mask) -> tuple[Tensor, Tensor]:
    return reference.attention(**reference.from_operator(arguments, block_mask))


def _rotary(*arguments) -> Tensor:
    return _ops.run(_ops.rotary, *arguments)


def _append(k_cache, v_cache, *arguments) -> None:
    _ops.run(_ops.append_kv, k_cache, v_cache, *arguments)
    if not torch.compiler.is_compiling():
        # Below autograd nobody counts the write; a graph that saved the cache must notice it.
        torch.autograd.graph.increment_version((k_cache, v_cache))


# Rotary, append and attention, the last with the arguments of the operator `forward`.
_KERNELS = _rotary, _append, _attend
_REFERENCE = reference_cache.rotary, reference_cache.append_kv, _attend_reference


def _new_tensors(q, k_cache, v_cache, k, v):
    """q, k, v; under torch.autocast in the caches' dtype, since a cache is not cast."""
    named = [("q", q), ("k_cache", k_cache), ("v_cache", v_cache)]
    if (k is None) != (v is None):
        shape_error(f"k and v must be given together, got {'v' if k is None else 'k'} alone")
    if k is not None:
        named += [("k", k), ("v", v)]
    if not all(isinstance(tensor, Tensor) for _, tensor in named):
        _checks.kind_error(*named)
    if not _checks.autocast(q.device):
        return q, k, v
    return tuple(None if x is None else _checks.cast(x, k_cache.dtype) for x in (q, k, v))


def _entries(q, k_cache, v_cache, cache_batch_idx, block_table):
    """Which cache entries serve the batch: (k_cache, v_cache, cache_batch_idx, block_table)."""
    batch = q.shape[0]
    if block_table is not None:
        if cache_batch_idx is not None:
            shape_error("block_table and cache_batch_idx exclude each other, got both")
        table = _checks.block_table(block_table, q, batch, k_cache, "k_cache")
        return k_cache, v_cache, None, table
    if cache_batch_idx is not None:
        return (
            k_cache,
            v_cache,
            _checks.per_batch("cache_batch_idx", cache_batch_idx, q, batch),
            None,
        )
    if k_cache.shape[0] < batch:
        shape_error(
            f"k_cache must have an entry for each of the {batch} batch entries of q, or "
            f"cache_batch_idx "
            f"must be given, got {k_cache.shape[0]} (k_cache.shape[0])"
        )
    if k_cache.shape[0] == batch:  # usual; the slices would cost more than this whole function
        return k_cache, v_cache, None, None
    return k_cache[:batch], v_cache[:batch], None, None


def _check_new(q, k_cache, v_cache, k, v, cache_seqlens) -> None:
    if cache_seqlens is None:
        shape_error("cache_seqlens must be given with k and v (where to append), got None")
    heads_k, head_dim, head_dim_v = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]
    seqlen = k.shape[1] if k.dim() == 4 else "seqlen_new"
    for name, tensor, dim in (("k", k, head_dim), ("v", v, head_dim_v)):
        if tensor.dim() != 4 or tensor.shape != (q.shape[0], seqlen, heads_k, dim):
            shape_error(
                f"{name} must have shape ({q.shape[0]}, {seqlen}, {heads_k}, {dim}) (batch, "
                f"seqlen_new, "
                f"num_heads_k, head_dim), got {shape(tensor)}"
            )
        if tensor.dtype != k_cache.dtype:
            raise TypeError(
                f"flash_attn: {name} must have the dtype of the caches, {k_cache.dtype}, got "
                f"{tensor.dtype}"
            )
        if tensor.device != k_cache.device:
            shape_error(
                f"{name} must be on the caches' device, {k_cache.device}, got {tensor.device}"
            )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        steps = cache.stride()
        if steps[-1] != 1 and cache.shape[-1] != 1:
            shape_error(
                f"{name} must be contiguous in its last dimension to be appended to, got strides "
                f"{tuple(steps)}"
            )
        if 0 in steps and any(
            step == 0 and size > 1 for step, size in zip(steps, cache.shape, strict=True)
        ):
            shape_error(
                f"{name} must not be expanded to be appended to, since several slots would be one "
                f"place in memory: got shape {shape(cache)} with strides {tuple(cache.stride())}"
            )


def _lengths(cache_seqlens, q: Tensor, batch: int, new: int, capacity: int) -> Tensor | None:
    """Live slots before the append, (batch,) int32 on the device; None for the whole capacity."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0:
        return _checks.per_batch("cache_seqlens", cache_seqlens, q, batch)
    if isinstance(cache_seqlens, Tensor):
        return _checks.per_batch("cache_seqlens", cache_seqlens.expand(batch), q, batch)
    if not _checks.whole(cache_seqlens):
        raise TypeError(
            "flash_attn: cache_seqlens must be an int or an int32 or int64 tensor, got "
            f"{type(cache_seqlens).__name__}"
        )
    if cache_seqlens < 0 or cache_seqlens + new > capacity:
        shape_error(
            f"cache_seqlens + seqlen_new must lie in 0 to {capacity} (the capacity of k_cache), "
            f"got "
            f"{cache_seqlens} + {new}"
        )
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)


def _check_rotary(q, k, cos, sin, cache_seqlens) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        shape_error(
            f"rotary_cos and rotary_sin must be given together, got "
            f"{'sin' if cos is None else 'cos'} alone"
        )
    if k is None:
        shape_error("rotary_cos and rotary_sin need new k and v to rotate, got k=None")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        _checks.optional(name, table, q, q.dtype, torch.float32)
    if cos.dim() != 2 or cos.shape != sin.shape or not 2 <= 2 * cos.shape[1] <= q.shape[-1]:
        shape_error(
            "rotary_cos and rotary_sin must have one shape (positions, rotary_dim / 2) with "
            f"rotary_dim from 2 to head_dim = {q.shape[-1]}, got {shape(cos)} and {shape(sin)}"
        )
    if cos.dtype != sin.dtype:
        raise TypeError(
            f"flash_attn: rotary_cos and rotary_sin must have one dtype, got {cos.dtype} and "
            f"{sin.dtype}"
        )
    known = not isinstance(cache_seqlens, (Tensor, torch.SymInt))
    if known and cache_seqlens + k.shape[1] > cos.shape[0]:
        shape_error(
            f"rotary_cos must hold a row for each position up to cache_seqlens + seqlen_new = "
            f"{cache_seqlens + k.shape[1]}, got {cos.shape[0]}"
        )


def _check_family(family: int, device: torch.device) -> None:
    """Refuses kernels that are not for this device, where something is written before they run."""
    if family in (2, 3) and device.type == "cpu":
        raise NotImplementedError(
            f'flash_attn: backend "sm{80 if family == 2 else 90}" runs on CUDA tensors, q is on '
            'the CPU; backend "cpu" or "reference" would do'
        )
    if family == 1 and device.type == "cuda":
        raise NotImplementedError(
            f'flash_attn: backend "cpu" runs on CPU tensors, q is on {device}; backend None or '
            '"reference" would do'
        )
