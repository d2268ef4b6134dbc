# SPDX-License-Identifier: BSD-3-Clause
"""The five functions of FlashAttention 2's extension, by position, on any device.

For clients that call the extension itself (xformers, MSLK, Transformer Engine), as the module
`flash_attn_2_cuda` or as `flash_attn.flash_attn_interface.flash_attn_gpu`. Nothing here is
differentiable. A generator of None is torch's default one. The order of arguments is that of
FlashAttention 2.8; shapes are those of `flash_attn_interface`.
"""

from . import _raw
from .interface import flash_attn_with_kvcache

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def fwd(
    q,
    k,
    v,
    out,
    alibi_slopes,
    dropout_p,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    return_softmax,
    generator=None,
):
    """[out, lse, S_dmask, rng_state]; `out` may be None or where to write."""
    window = window_left, window_right
    result = _raw.forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        return_softmax,
        generator=generator,
    )
    return _written(out, result)


def varlen_fwd(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    block_table,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_left,
    window_right,
    softcap,
    return_softmax,
    generator=None,
    num_splits=0,
):
    """[out, lse, S_dmask, rng_state]; `out` may be None or where to write."""
    window = window_left, window_right
    result = _raw.forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        return_softmax,
        (cu_seqlens_q, cu_seqlens_k),
        seqused_k,
        leftpad_k,
        block_table,
        generator,
    )
    return _written(out, result)


def bwd(
    dout,
    q,
    k,
    v,
    out,
    lse,
    dq,
    dk,
    dv,
    alibi_slopes,
    dropout_p,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    deterministic,
    generator=None,
    rng_state=None,
):
    """[dq, dk, dv, softmax_d]; dq, dk and dv may be None or where to write."""
    options = dropout_p, softmax_scale, causal, (window_left, window_right), softcap
    return list(
        _raw.backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            (dq, dk, dv),
            *options,
            alibi_slopes,
            deterministic,
            rng_state,
        )
    )


def varlen_bwd(
    dout,
    q,
    k,
    v,
    out,
    lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_left,
    window_right,
    softcap,
    deterministic,
    generator=None,
    rng_state=None,
):
    """[dq, dk, dv, softmax_d]; dq, dk and dv may be None or where to write."""
    options = dropout_p, softmax_scale, causal, (window_left, window_right), softcap
    return list(
        _raw.backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            (dq, dk, dv),
            *options,
            alibi_slopes,
            deterministic,
            rng_state,
            (cu_seqlens_q, cu_seqlens_k),
        )
    )


def fwd_kvcache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    cache_seqlens,
    rotary_cos,
    rotary_sin,
    cache_batch_idx,
    leftpad_k,
    block_table,
    alibi_slopes,
    out,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    rotary_interleaved,
    num_splits,
):
    """[out, lse]; `out` may be None or where to write. k and v are appended in place."""
    result = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        leftpad_k,
        block_table,
        softmax_scale,
        causal,
        (window_left, window_right),
        softcap,
        rotary_interleaved,
        alibi_slopes,
        num_splits,
        True,
    )
    return _written(out, result)


def _written(place, result):
    out, *others = result
    return [out if place is None else place.copy_(out), *others]
