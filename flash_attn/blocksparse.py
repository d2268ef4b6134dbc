# SPDX-License-Identifier: BSD-3-Clause
"""Block-sparse attention under a name of its own, that of the first FlashAttention's paper."""

from __future__ import annotations

from torch import Tensor

from . import _checks
from .interface import flash_attn_func
from .masks import BlockMask


def flash_attn_blocksparse_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` over the blocks of a `BlockMask`: time goes with its density.

    Query i sees key j where the mask, causal and the window all let it. A query that sees nothing
    gives 0, and -inf in lse. The same as flash_attn_func(q, k, v, …, block_mask=block_mask).

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_heads_k, head_dim).
        v: (batch, seqlen_k, num_heads_k, head_dim_v).
        block_mask: of batch or 1, num_heads or 1, and as many blocks as the lengths ask for. In
            grouped-query attention each query head may have a pattern of its own.
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
        return_lse: return (out, lse).
        backend: None, "cpu", "sm80", "sm90" or "reference".
    Returns and differentiates as `flash_attn_func`.
    Raises:
        TypeError: block_mask is no `BlockMask`.  ValueError: it does not fit the lengths, batch or
            heads.  The rest as `flash_attn_func`.
    Source: https://arxiv.org/abs/2205.14135, section 3.3
    """
    if block_mask is None:  # which flash_attn_func takes for no mask at all
        _checks.not_a_block_mask(block_mask)
    return flash_attn_func(
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
        attn_bias=attn_bias,
        learnable_sink=learnable_sink,
        s_aux=s_aux,
        block_mask=block_mask,
        return_lse=return_lse,
        backend=backend,
    )
