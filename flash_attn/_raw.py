# SPDX-License-Identifier: BSD-3-Clause
"""One forward or backward pass by itself, below autograd, as FlashAttention 2's private functions
offer it: ring attention, context parallelism and other clients differentiate around these.

`flash_attn_interface` gives them FlashAttention 2's Python signatures, `flash_attn_2_cuda` those of
its extension. What a forward pass drew for dropout goes to the backward pass as `rng_state`, (2,)
int64: seed and offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _contents, _ops, reference
from ._philox import draw_seed, realised_dropout

_NO_LISTS = (None,) * 7
_ALL_OF_QKV = 7  # the operator's `needs`


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, S_dmask, rng_state).

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or with cu_seqlens (total_q, num_heads,
            head_dim).
        k: as q with num_heads_k; with block_table (num_pages, page_size, num_heads_k, head_dim).
        v: as k, with head_dim_v.
        dropout_p: 0 <= dropout_p < 1; a rate that rounds to 0 costs nothing.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: window right = 0.
        window: (left, right), -1 is unlimited.
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        return_softmax: S_dmask, as `flash_attn_func` describes it, when something is dropped.
        cu_seqlens: of queries and of keys, (batch + 1,) each.
        seqused_k: (batch,) live keys.
        leftpad_k: (batch,) first live key.
        block_table: (batch, max_pages).
        generator: of the dropout seed; default torch's of q's device.
    Returns:
        out as q; lse (batch, num_heads, seqlen_q) or (num_heads, total_q); S_dmask, empty unless
        asked for; rng_state (2,) int64, undefined without dropout.
    """
    packed = cu_seqlens is not None
    layout = _checks.DENSE
    if packed:
        layout = _checks.PACKED if block_table is None else _checks.PACKED_PAGED
    q, k, v = _checks.inputs(q, k, v, layout, cast=False)
    lengths, batch = _lengths(q, k, cu_seqlens, seqused_k)
    if leftpad_k is not None:
        leftpad_k = _checks.per_batch("leftpad_k", leftpad_k, q, batch)
    if block_table is not None:
        block_table = _checks.block_table(block_table, q, batch, k, "k")
    if alibi_slopes is not None:
        alibi_slopes = _checks.slopes(alibi_slopes, q, batch)
    asked_p = _checks.dropout(dropout_p)
    realised_p, philox = realised_dropout(asked_p) if asked_p else 0.0, None
    if asked_p:
        philox = draw_seed(q.device, generator)
    arguments = (
        q,
        k,
        v,
        *lengths,
        leftpad_k,
        None,
        block_table,
        None,
        alibi_slopes,
        None,
        *_NO_LISTS,
        philox,
        *_numbers(q, softmax_scale, softcap, realised_p, causal, window),
        False,
        _checks.family(None),
    )
    is_reference = arguments[-1] == _checks.REFERENCE
    if packed and _contents.wanted(q, is_reference):
        _contents.attention(arguments)
    if is_reference:
        with torch.no_grad():
            out, lse = reference.attention(**reference.from_operator(arguments, None))
    else:
        out, lse = _ops.run(_ops.forward, *arguments)
    probs = q.new_empty(0)
    if return_softmax and realised_p:
        with torch.no_grad():
            probs = reference.dropout_scores(**reference.from_operator(arguments, None))
    if philox is None:
        philox = q.new_empty(2, dtype=torch.int64)
    return out, lse, probs, philox


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, delta).

    Args:
        dout: as out.
        q: as in `forward`, and so are the others where nothing is said.
        k: as q.
        v: as k.
        out: of the forward pass, or a result merged from several.
        lse: likewise; any strides.
        grads: where to write dq, dk and dv; None allocates.
        dropout_p: of the forward pass.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: window right = 0.
        window: (left, right).
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads).
        deterministic: the same bits each run.
        rng_state: of the forward pass; needed with dropout.
        cu_seqlens: of queries and of keys.
    Returns:
        The gradients, and rowsum(out * dout) in the shape of lse.
    """
    layout = _checks.DENSE if cu_seqlens is None else _checks.PACKED
    q, k, v = _checks.inputs(q, k, v, layout, cast=False)
    (cu_q, cu_k, _), batch = _lengths(q, k, cu_seqlens, None)
    if alibi_slopes is not None:
        alibi_slopes = _checks.slopes(alibi_slopes, q, batch)
    asked_p = _checks.dropout(dropout_p)
    realised_p = realised_dropout(asked_p) if asked_p else 0.0
    if realised_p and rng_state is None:
        raise ValueError(
            "flash_attn: rng_state of the forward pass must be given with dropout, got None"
        )
    numbers = _numbers(q, softmax_scale, softcap, realised_p, causal, window)
    dout, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, out))
    family = _checks.family(None)
    made = _ops.run(
        _ops.backward,
        dout,
        None,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        cu_q,
        cu_k,
        None,
        None,
        alibi_slopes,
        None,
        *_NO_LISTS,
        rng_state if realised_p else None,
        *numbers,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        _ALL_OF_QKV,
        0 if family == _checks.REFERENCE else family,  # the reference has no separate backward
    )[:3]
    written = (
        grad if place is None else place.copy_(grad)
        for grad, place in zip(made, grads, strict=True)
    )
    return *written, _ops.run(_ops.delta, out, dout)


def _lengths(q, k, cu_seqlens, seqused_k):
    """(cu_seqlens_q, cu_seqlens_k, seqused_k), each checked or None, and the batch size."""
    if cu_seqlens is None:
        batch = q.shape[0]
        if seqused_k is not None:
            seqused_k = _checks.per_batch("seqused_k", seqused_k, q, batch)
        return (None, None, seqused_k), batch
    batch, cu_q, cu_k, seqused_k, _ = _checks.ragged(q, k, k, *cu_seqlens, seqused_k, None, ())
    return (cu_q, cu_k, seqused_k), batch


def _numbers(q, softmax_scale, softcap, dropout_p, causal, window) -> tuple:
    """The operators' numbers from softmax_scale to block_k."""
    scale = q.shape[-1] ** -0.5
    if softmax_scale is not None:
        scale = _checks.scale(softmax_scale, q.dtype)
    # Clients write any negative number for "no limit".
    left, right = _checks.window(tuple(-1 if side is None else max(side, -1) for side in window))
    right = 0 if _checks.flag("causal", causal) else right
    return scale, _checks.softcap(softcap, q.dtype), dropout_p, left, right, 0, 0
