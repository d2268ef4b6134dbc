# SPDX-License-Identifier: BSD-3-Clause
"""The public functions: FlashAttention 2's signatures, then this package's keyword-only arguments.

What a call means is said once, in `flash_attn_func`; the others say only how they differ. All of
them check their arguments (`_checks`), draw the dropout seed, and end in one operator
(`_autograd.attend`) or in `reference.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _contents, kvcache, reference
from ._autograd import attend
from ._philox import draw_seed, realised_dropout
from .masks import BlockMask

_Out = Tensor | tuple[Tensor, ...]
_UNLIMITED = (-1, -1)
_NO_LISTS, _NO_BLOCKS = (None,) * 7, (0, 0)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> _Out:
    """Exact attention: softmax(q @ k.T * softmax_scale + mask) @ v, without storing the scores.

    Row i sees key j iff  i + sk - sq - left <= j <= i + sk - sq + right  (bottom-right aligned).
    causal=True is right = 0. For sq = 2, sk = 5 and for sq = 5, sk = 2:

        1 1 1 1 0        0 0
        1 1 1 1 1        0 0
                         0 0
                         1 0
                         1 1

    A row that sees no key gives 0, and -inf in lse. One score goes through, in this order:
    softmax_scale, softcap, alibi_slopes, attn_bias, the masks (all of them must let it through),
    the softmax with learnable_sink in its denominator, dropout.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), float16, bfloat16, float32; float64 on the CPU.
            Any strides; a last stride other than 1 costs a copy. Cast under torch.autocast.
        k: (batch, seqlen_k, num_heads_k, head_dim), same dtype. num_heads_k divides num_heads:
            query head h reads key head h // (num_heads // num_heads_k).
        v: (batch, seqlen_k, num_heads_k, head_dim_v), same dtype.
        dropout_p: 0 <= dropout_p < 1, on the probabilities, realised to 2^-16 (at most 1 - 2^-16).
            Drawn from torch's default generator of q's device.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides keys after the bottom-right diagonal.
        window_size: (left, right) in keys, -1 for unlimited; a tuple, a list or a CPU integer
            tensor.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32; score -= slope * |i + sk - sq -
            j|.
        deterministic: the same gradient bits each run; also by torch.use_deterministic_algorithms.
        return_attn_probs: return (out, lse, S_dmask) as FlashAttention 2 does; for tests. With
            dropout S_dmask is of size seqlen_q * seqlen_k, slow, and synchronises on ragged
            batches.
        attn_bias: broadcastable to (batch, num_heads, seqlen_q, seqlen_k), dtype of q or float32,
            added; or bool, True is visible. Never expanded in memory.
        learnable_sink: (num_heads,), dtype of q or float32; one more logit, with no value.
        s_aux: another name of learnable_sink.
        block_mask: a `BlockMask`; hidden blocks cost nothing.
        return_lse: return (out, lse).
        backend: None, "cpu", "sm80", "sm90" or "reference" (plain torch, quadratic memory). None
            asks FLASH_ATTN_BACKEND, then takes the best kernel.
    Returns:
        out: (batch, seqlen_q, num_heads, head_dim_v), dtype of q.
        lse: (batch, num_heads, seqlen_q), float32 (float64 with float64), natural log of the row's
            sum of exponentials. Only if return_lse or return_attn_probs.
        S_dmask: (batch, num_heads, seqlen_q, seqlen_k), dtype of q: exp(score - row maximum),
            negative where dropped; empty at dropout_p == 0. Only if return_attn_probs.
    Raises:
        ValueError: shapes or values.  TypeError: dtypes or kinds.  torch.OutOfMemoryError: memory.
        NotImplementedError: no compiled kernel fits; the message lists why.
    Differentiable in q, k, v, attn_bias, alibi_slopes and the sink, through out and lse. Forward
    mode and derivatives of the gradients run in plain torch: slowly, in linear memory.
    Source: https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2307.08691
    """
    return _attention(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_bias,
        learnable_sink,
        s_aux,
        block_mask,
        return_lse,
        backend,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> _Out:
    """`flash_attn_func` with k and v in one tensor; the gradient of kv is one tensor too.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        kv: (batch, seqlen_k, 2, num_heads_k, head_dim); k is kv[:, :, 0].
        dropout_p: this and all that follow: see `flash_attn_func`.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides keys after the bottom-right diagonal.
        window_size: (left, right) in keys, -1 for unlimited.
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        deterministic: the same gradient bits each run.
        return_attn_probs: return (out, lse, S_dmask).
        attn_bias: broadcastable to (batch, num_heads, seqlen_q, seqlen_k).
        learnable_sink: (num_heads,).
        s_aux: another name of learnable_sink.
        block_mask: a `BlockMask`.
        return_lse: return (out, lse).
        backend: None, "cpu", "sm80", "sm90" or "reference".
    Returns, raises and differentiates as `flash_attn_func`.
    """
    k, v = _unpack("kv", kv, 5, 2, "(batch, seqlen_k, 2, num_heads_k, head_dim)")
    return _attention(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_bias,
        learnable_sink,
        s_aux,
        block_mask,
        return_lse,
        backend,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> _Out:
    """`flash_attn_func` with q, k and v in one tensor; the gradient of qkv is one tensor too.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim); q is qkv[:, :, 0].
        dropout_p: this and all that follow: see `flash_attn_func`.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides later keys.
        window_size: (left, right) in keys, -1 for unlimited.
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        deterministic: the same gradient bits each run.
        return_attn_probs: return (out, lse, S_dmask).
        attn_bias: broadcastable to (batch, num_heads, seqlen, seqlen).
        learnable_sink: (num_heads,).
        s_aux: another name of learnable_sink.
        block_mask: a `BlockMask`.
        return_lse: return (out, lse).
        backend: None, "cpu", "sm80", "sm90" or "reference".
    Returns, raises and differentiates as `flash_attn_func`.
    """
    q, k, v = _unpack("qkv", qkv, 5, 3, "(batch, seqlen, 3, num_heads, head_dim)")
    return _attention(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_bias,
        learnable_sink,
        s_aux,
        block_mask,
        return_lse,
        backend,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> _Out:
    """`flash_attn_func` on sequences of different lengths, packed one after another.

    Sequence b of q is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; of k and v likewise. Positions,
    masks, bias and dropout count inside the sequence; empty sequences may stand anywhere. Rows past
    cu_seqlens_q[-1] come back as 0, lse -inf, and their gradients as 0.

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_heads_k, head_dim); with block_table (num_pages, page_size, num_heads_k,
            head_dim).
        v: as k, with head_dim_v.
        cu_seqlens_q: (batch + 1,), int32 or int64, on q's device, cumulative lengths from 0.
        cu_seqlens_k: (batch + 1,), the same for k and v.
        max_seqlen_q: a hint that is not needed: any value, or None, gives the same answer.
        max_seqlen_k: likewise.
        dropout_p: this and all that follow, where nothing is said: see `flash_attn_func`.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides keys after each sequence's bottom-right diagonal.
        window_size: (left, right) in keys, -1 for unlimited.
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        deterministic: the same gradient bits each run.
        return_attn_probs: return (out, lse, S_dmask), S_dmask of the longest lengths; synchronises.
        block_table: (batch, max_pages), int32 or int64: slot j of a sequence is row j % page_size
            of page block_table[b, j // page_size]; -1 is no page. Has no backward.
        seqused_k: (batch,), int32 or int64, live length of each key sequence.
        attn_bias: (batch or 1, num_heads or 1, longest seqlen_q or 1, longest seqlen_k or 1); may
            be larger.
        learnable_sink: (num_heads,).
        s_aux: another name of learnable_sink.
        block_mask: a `BlockMask`; blocks past a sequence's end are ignored.
        return_lse: return (out, lse).
        backend: None, "cpu", "sm80", "sm90" or "reference".
    Returns:
        out: (total_q, num_heads, head_dim_v), dtype of q.
        lse: (num_heads, total_q), float32 (float64 with float64). Only if return_lse or
            return_attn_probs.
        S_dmask: (batch, num_heads, longest seqlen_q, longest seqlen_k). Only if return_attn_probs.
    Raises and differentiates as `flash_attn_func`. Contents of cu_seqlens are checked on the CPU.
    """
    return _attention(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_bias,
        learnable_sink,
        s_aux,
        block_mask,
        return_lse,
        backend,
        True,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_k: Tensor | None = None,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> _Out:
    """`flash_attn_varlen_func` with k and v in one tensor; the gradient of kv is one tensor too.

    Args:
        q: (total_q, num_heads, head_dim).
        kv: (total_k, 2, num_heads_k, head_dim); k is kv[:, 0].
        cu_seqlens_q: (batch + 1,), int32 or int64.
        cu_seqlens_k: (batch + 1,), int32 or int64.
        max_seqlen_q: not needed.
        max_seqlen_k: not needed.
        dropout_p: this and all that follow: see `flash_attn_varlen_func`.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides keys after each sequence's bottom-right diagonal.
        window_size: (left, right) in keys, -1 for unlimited.
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        deterministic: the same gradient bits each run.
        return_attn_probs: return (out, lse, S_dmask).
        seqused_k: (batch,), live length of each key sequence.
        attn_bias: (batch or 1, num_heads or 1, longest seqlen_q or 1, longest seqlen_k or 1).
        learnable_sink: (num_heads,).
        s_aux: another name of learnable_sink.
        block_mask: a `BlockMask`.
        return_lse: return (out, lse).
        backend: None, "cpu", "sm80", "sm90" or "reference".
    Returns, raises and differentiates as `flash_attn_varlen_func`.
    """
    k, v = _unpack("kv", kv, 4, 2, "(total_k, 2, num_heads_k, head_dim)")
    return _attention(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_bias,
        learnable_sink,
        s_aux,
        block_mask,
        return_lse,
        backend,
        True,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_k: Tensor | None = None,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> _Out:
    """`flash_attn_varlen_func` with q, k and v in one tensor; the gradient of qkv is one tensor
    too.

    Args:
        qkv: (total, 3, num_heads, head_dim); q is qkv[:, 0].
        cu_seqlens: (batch + 1,), int32 or int64.
        max_seqlen: not needed.
        dropout_p: this and all that follow: see `flash_attn_varlen_func`.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides later keys.
        window_size: (left, right) in keys, -1 for unlimited.
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        deterministic: the same gradient bits each run.
        return_attn_probs: return (out, lse, S_dmask).
        seqused_k: (batch,), live length of each key sequence.
        attn_bias: (batch or 1, num_heads or 1, longest seqlen or 1, longest seqlen or 1).
        learnable_sink: (num_heads,).
        s_aux: another name of learnable_sink.
        block_mask: a `BlockMask`.
        return_lse: return (out, lse).
        backend: None, "cpu", "sm80", "sm90" or "reference".
    Returns, raises and differentiates as `flash_attn_varlen_func`.
    """
    q, k, v = _unpack("qkv", qkv, 4, 3, "(total, 3, num_heads, head_dim)")
    return _attention(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_bias,
        learnable_sink,
        s_aux,
        block_mask,
        return_lse,
        backend,
        True,
        cu_seqlens,
        cu_seqlens,
        seqused_k,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> _Out:
    """Attention over a cache of keys and values, after appending new ones to it in place.

    The new k, v take slots cache_seqlens[b] … of the caches, k after rotary; then the queries see
    slots cache_leftpad[b] to cache_seqlens[b] + seqlen_new, bottom-right aligned as in
    `flash_attn_func`. What stands in other slots is never read. Positions, attn_bias and block_mask
    count cache slots.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_cache: (batch_cache, capacity, num_heads_k, head_dim), or with block_table
            (num_pages, page_size, num_heads_k, head_dim), any page size.
        v_cache: as k_cache, with head_dim_v.
        k: (batch, seqlen_new, num_heads_k, head_dim), keys to append; needs v and cache_seqlens.
        v: (batch, seqlen_new, num_heads_k, head_dim_v).
        rotary_cos: (positions, rotary_dim / 2), dtype of q or float32; needs k. Rotates the first
            rotary_dim elements of new keys, at their slots, and of queries: query i at
            cache_seqlens + i under causal or a window, all at cache_seqlens otherwise.
        rotary_sin: as rotary_cos.
        cache_seqlens: int, or (batch,) int32 or int64: live slots before the append. Default:
            capacity.
        cache_batch_idx: (batch,), the cache entry of each batch entry. Not with block_table.
        cache_leftpad: (batch,), first live slot.
        block_table: (batch, max_pages), int32 or int64; -1 is no page.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides keys after the bottom-right diagonal.
        window_size: (left, right) in keys, -1 for unlimited.
        softcap: 0 is off.
        rotary_interleaved: rotate elements (0, 1), (2, 3), …; otherwise the two halves against each
            other.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        num_splits: slices of the key range, 0 for the planner's choice; never changes the answer.
        return_softmax_lse: return (out, lse).
        attn_bias: broadcastable to (batch, num_heads, seqlen_q, capacity), or longer at the end;
            with pages it must reach the longest length.
        learnable_sink: (num_heads,).
        s_aux: another name of learnable_sink.
        block_mask: a `BlockMask` over seqlen_q and the capacity (pages: the longest length).
        return_lse: the same as return_softmax_lse.
        backend: None, "cpu", "sm80", "sm90" or "reference".
    Returns:
        out: (batch, seqlen_q, num_heads, head_dim_v), dtype of q.
        lse: (batch, num_heads, seqlen_q), float32 (float64 with float64). Only if asked for.
    Raises as `flash_attn_func`. On the CPU lengths and page numbers are checked before anything is
    written. Not differentiable: NotImplementedError if an input requires a gradient in grad mode.
    """
    _checks.splits(num_splits)
    out, lse = kvcache.decode(
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
        rotary_interleaved,
        alibi_slopes,
        attn_bias,
        learnable_sink,
        s_aux,
        block_mask,
        backend,
    )
    return (out, lse) if return_softmax_lse or return_lse else out


def _unpack(name: str, packed: Tensor, rank: int, parts: int, layout: str) -> tuple[Tensor, ...]:
    """q, k, v or k, v as views of a packed tensor."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"flash_attn: {name} must be a torch.Tensor, got {type(packed).__name__}")
    if packed.dim() != rank or packed.shape[-3] != parts:
        raise ValueError(f"flash_attn: {name} must have shape {layout}, got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _attention(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    deterministic,
    return_attn_probs,
    attn_bias,
    learnable_sink,
    s_aux,
    block_mask,
    return_lse,
    backend,
    varlen=False,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_k=None,
    block_table=None,
) -> _Out:
    """Every public function but the cache's: checks, completes and runs one call.

    Kept lean: on a tiny tensor this function is most of the time of a call.
    """
    if not varlen:
        q, k, v = _checks.inputs(q, k, v, _checks.DENSE)
        batch, seqlen_q, _, head_dim = q.shape
        seqlen_k = k.shape[1]
    else:
        packed = _checks.PACKED if block_table is None else _checks.PACKED_PAGED
        q, k, v = _checks.inputs(q, k, v, packed)
        batch, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table = _checks.ragged(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
            (alibi_slopes, attn_bias, learnable_sink, s_aux),
        )  # fmt: skip
        seqlen_q, seqlen_k, head_dim = None, None, q.shape[-1]
    scale = head_dim**-0.5 if softmax_scale is None else _checks.scale(softmax_scale, q.dtype)
    left, right = -1, -1  # Dynamo cannot compare identities when a side is symbolic
    if torch.compiler.is_compiling() or window_size is not _UNLIMITED:
        left, right = _checks.window(window_size)
    if causal is True or (causal is not False and _checks.flag("causal", causal)):
        right = 0
    if deterministic is not False and deterministic is not None:
        deterministic = _checks.flag("deterministic", deterministic)
    # By type first: comparing what is no number may raise, or not give a bool.
    if type(softcap) is not float or softcap != 0.0:
        softcap = _checks.softcap(softcap, q.dtype)
    asked_p = dropout_p
    if type(dropout_p) is not float or dropout_p != 0.0:
        asked_p = _checks.dropout(dropout_p)
    if alibi_slopes is not None:
        alibi_slopes = _checks.slopes(alibi_slopes, q, batch)
    if attn_bias is not None:
        attn_bias = _checks.bias(attn_bias, q, batch, seqlen_q, seqlen_k, False)
    sinks = None
    if learnable_sink is not None or s_aux is not None:
        sinks = _checks.sinks(learnable_sink, s_aux, q)
    if block_mask is not None:
        _checks.block_mask(block_mask, q, batch, seqlen_q, seqlen_k)
    family = _checks.family(backend)
    realised_p, philox = 0.0, None
    if asked_p:
        realised_p = realised_dropout(asked_p)
        # Drawn even for a rate that rounds to 0: what follows does not depend on the rounding.
        philox = draw_seed(q.device)
    arguments = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        None,
        None,
        block_table,
        attn_bias,
        alibi_slopes,
        sinks,
        *(_NO_LISTS if block_mask is None else block_mask.lists),
        philox,
        scale,
        softcap,
        realised_p,
        left,
        right,
        *(_NO_BLOCKS if block_mask is None else block_mask.block_size),
        deterministic or torch.are_deterministic_algorithms_enabled(),
        family,
    )
    if varlen or block_mask is not None:
        if _contents.wanted(q, family == _checks.REFERENCE):
            _contents.attention(arguments)
    if family == _checks.REFERENCE:
        out, lse = reference.attention(**reference.from_operator(arguments, block_mask))
    else:
        out, lse = attend(arguments)
    if return_attn_probs:
        probs = q.new_empty(0)
        if asked_p:
            plain = reference.from_operator(arguments, block_mask)
            with torch.no_grad():
                probs = reference.dropout_scores(**plain)
        return out, lse, probs
    return (out, lse) if return_lse else out
