# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention 2's module of the same name: its public functions, and the private ones that ring
attention, context parallelism and other clients call by name.

The private functions run one pass below autograd. Their dropout state (2,) int64 is seed and
offset; softmax_d is rowsum(out * dout). `_wrapped_…` are other names of the same functions, and
`flash_attn_gpu` has the functions of the module `flash_attn_2_cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _extension as flash_attn_gpu
from . import _raw
from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .reference import _get_block_size_n

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x with a contiguous last dimension."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse (batch, num_heads, seqlen_q), S_dmask, rng_state)."""
    window = window_size_left, window_size_right
    return _raw.forward(
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
    )


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse (num_heads, total_q), S_dmask, rng_state)."""
    return _raw.forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        alibi_slopes,
        return_softmax,
        (cu_seqlens_q, cu_seqlens_k),
        seqused_k,
        leftpad_k,
        block_table,
    )


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv; returns softmax_d (batch, num_heads, seqlen_q)."""
    return _raw.backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        (dq, dk, dv),
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
    )[3]


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk and dv; returns softmax_d (num_heads, total_q)."""
    return _raw.backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        (dq, dk, dv),
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
        (cu_seqlens_q, cu_seqlens_k),
    )[3]


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _function_class(name: str, function):
    """What FlashAttention 2 calls an autograd.Function: `apply`, by position.

    Its arguments are the public function's, then is_grad_enabled; a varlen one's block_table stands
    before that.
    """

    def apply(*arguments) -> Tensor | tuple[Tensor, ...]:
        *arguments, is_grad_enabled = arguments
        with torch.set_grad_enabled(is_grad_enabled and torch.is_grad_enabled()):
            return function(*arguments)

    return type(name, (), {"__doc__": function.__doc__, "apply": staticmethod(apply)})


FlashAttnFunc = _function_class("FlashAttnFunc", flash_attn_func)
FlashAttnKVPackedFunc = _function_class("FlashAttnKVPackedFunc", flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = _function_class("FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = _function_class("FlashAttnVarlenFunc", flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc = _function_class(
    "FlashAttnVarlenKVPackedFunc", flash_attn_varlen_kvpacked_func
)
FlashAttnVarlenQKVPackedFunc = _function_class(
    "FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func
)
