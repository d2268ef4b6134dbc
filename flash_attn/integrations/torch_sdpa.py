# SPDX-License-Identifier: BSD-3-Clause
"""torch.nn.functional.scaled_dot_product_attention on this package's kernels.

    import flash_attn
    torch.nn.attention.activate_flash_attention_impl("flash_attn")
    …
    torch.nn.attention.restore_flash_attention_impl()

Importing the package registers the name with torch (2.11 and newer) and changes nothing; activation
replaces the kernels below torch's own choice between its attention operators:

    CPU     the flash operator: no dropout, masks that need no gradient
    CUDA    the flash and the memory-efficient operators: fp16, bf16 and fp32, dropout, masks and
            biases with their gradient; torch.nn.attention.varlen; cuDNN's is switched off

What torch sends to its math operator stays there. Where these kernels lack something (a head_dim
above 256 on CUDA, bf16 before compute capability 8.0) the replaced one still runs. is_causal keeps
torch's meaning, aligned to the top left.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import attention

from .. import _checks, _ops
from .._philox import draw_seed, realised_dropout

NAME = "flash_attn"
_HALF = (torch.float16, torch.bfloat16)


def register() -> bool:
    """Makes the name known to torch.nn.attention; whether this torch can take one."""
    if not hasattr(attention, "register_flash_attention_impl"):
        return False
    attention.register_flash_attention_impl(NAME, register_fn=activate)
    return True


@dataclass
class Activation:
    """What torch keeps while the kernels are replaced."""

    libraries: list[torch.library.Library]
    cudnn: bool | None  # whether cuDNN's attention was on

    def remove(self) -> None:
        """Puts torch's kernels back."""
        for library in self.libraries:
            library._destroy()
        self.libraries.clear()
        if self.cudnn is not None:
            torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


def activate(**options) -> Activation:
    """Replaces torch's attention kernels; torch calls it, through activate_flash_attention_impl.

    Args:
        **options: of other implementations.
    Returns:
        What undoes it: `remove()`.
    """
    cudnn = None
    libraries = [_install("CPU", _CPU)]
    if _ops._C_cuda is not None and torch.version.cuda:
        libraries.append(_install("CUDA", _CUDA))
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
    return Activation(libraries, cudnn)


def _install(key: str, kernels: dict) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", key)
    for name, kernel in kernels.items():
        replaced = torch.library.get_kernel(f"aten::{name}", key)
        chosen = _choose(kernel, replaced, name.endswith("_backward"))
        with warnings.catch_warnings():  # of a replaced kernel: that is what the caller asked for
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl(name, chosen, key, with_keyset=True)
    return library


def _choose(kernel, replaced, backward: bool):
    """Ours or the replaced kernel, by what a forward and its backward have in common."""

    @functools.wraps(kernel)
    def call(keys, *arguments, **options):
        query, _, value = arguments[1:4] if backward else arguments[:3]
        if _served(query, value):
            return kernel(*arguments, **options)
        return replaced.call_boxed(keys, *arguments, **options)

    return call


def _served(query: Tensor, value: Tensor) -> bool:
    if not query.is_cuda:
        return query.dtype in _checks.DTYPES
    if max(query.shape[-1], value.shape[-1]) > 256:
        return False
    if query.dtype not in (*_HALF, torch.float32):
        return False
    return query.dtype == torch.float16 or _capability(query.device) >= 8


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


# ---- one call in the package's layout, (batch, seqlen, heads, head_dim)


@dataclass
class _Call:
    """What a forward and its backward share."""

    scale: float
    dropout_p: float  # realised
    left: int
    right: int
    keys: int | None = None  # of them the queries see none beyond
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None

    def forward(self, q, k, v, philox) -> tuple[Tensor, Tensor]:
        q, k, v = (_unit_stride(x) for x in (q, *self._cut(k, v)))
        return _ops.call(
            _ops.forward, q, k, v, *self.cu_seqlens, self.seqused_k, None, None, None, self.bias,
            self.alibi_slopes, None, *(None,) * 7, philox, *self._numbers(), 0,
        )  # fmt: skip

    def backward(self, dout, q, k, v, out, lse, philox, needs=7) -> tuple[Tensor, ...]:
        """dq, dk, dv and dbias."""
        rows = k.shape[1]
        dout, q, out, k, v = (_unit_stride(x) for x in (dout, q, out, *self._cut(k, v)))
        dq, dk, dv, dbias, *_ = _ops.call(
            _ops.backward, dout, None, q, k, v, out, lse.contiguous(), *self.cu_seqlens,
            self.seqused_k, self.bias, self.alibi_slopes, None, *(None,) * 7, philox,
            *self._numbers(), needs, 0,
        )  # fmt: skip
        if self.keys is not None and self.keys < rows:
            rest = (0, 0, 0, 0, 0, rows - self.keys)
            dk, dv = (torch.nn.functional.pad(x, rest) for x in (dk, dv))
        return dq, dk, dv, dbias

    def _cut(self, k, v):
        return (k, v) if self.keys is None else (k[:, : self.keys], v[:, : self.keys])

    def _numbers(self) -> tuple:
        """From softmax_scale to deterministic, in the operators' order."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return self.scale, 0.0, self.dropout_p, self.left, self.right, 0, 0, deterministic


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(q, scale, dropout_p, **others) -> _Call:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _Call(scale, realised_dropout(dropout_p) if dropout_p else 0.0, **others)


def _sdpa(q, k, is_causal, scale, dropout_p, mask=None) -> _Call:
    """A call of scaled_dot_product_attention: causal is aligned to the top left."""
    rows, columns = q.shape[1], k.shape[1]
    right, keys = -1, None
    if is_causal:
        right, keys = max(rows - columns, 0), min(rows, columns)
    if mask is not None:
        mask = _checks.bias(mask, q, q.shape[0], rows, columns, False)
        mask = mask if keys is None or mask.shape[3] == 1 else mask[..., :keys]
    return _call(q, scale, dropout_p, left=-1, right=right, keys=keys, bias=mask)


def _heads_last(*tensors: Tensor) -> list[Tensor]:
    """Between torch's (batch, heads, seqlen, head_dim) and (batch, seqlen, heads, head_dim)."""
    return [x.transpose(1, 2) for x in tensors]


def _strided_like(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides of torch.empty_like(like): what compiled code expects."""
    wanted = torch.empty_like(like, device="meta").stride()
    if all(a == b or n == 1 for a, b, n in zip(x.stride(), wanted, x.shape, strict=True)):
        return x
    return torch.empty_like(like).copy_(x)


def _draw(q: Tensor, dropout_p: float) -> Tensor | None:
    return draw_seed(q.device) if dropout_p else None


# ---- torch's operators, by their schemas


def _cpu_forward(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, **_
):
    q, k, v = _heads_last(query, key, value)
    call = _sdpa(q, k, is_causal, scale, dropout_p, attn_mask)
    out, lse = call.forward(q, k, v, _draw(q, dropout_p))
    out = _strided_like(out.transpose(1, 2), query)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None,
    scale=None, **_,
):  # fmt: skip
    dout, q, k, v, o = _heads_last(grad_out, query, key, value, out)
    call = _sdpa(q, k, is_causal, scale, dropout_p, attn_mask)
    return tuple(_heads_last(*call.backward(dout, q, k, v, o, logsumexp, None)[:3]))


def _no_debug_mask(wanted: bool) -> None:
    if wanted:
        raise NotImplementedError(
            "flash_attn: return_debug_mask=True is not implemented; flash_attn_func has "
            "return_attn_probs"
        )


def _seeds(q: Tensor, philox: Tensor | None) -> tuple[Tensor, Tensor]:
    """rng_state and the unused one, as the flash operators return them."""
    state = q.new_empty(2, dtype=torch.uint64) if philox is None else philox.view(torch.uint64)
    return state, q.new_empty((), dtype=torch.uint64)


def _flash_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None, **_
):
    _no_debug_mask(return_debug_mask)
    q, k, v = _heads_last(query, key, value)
    philox = _draw(q, dropout_p)
    out, lse = _sdpa(q, k, is_causal, scale, dropout_p).forward(q, k, v, philox)
    out = _strided_like(out.transpose(1, 2), query)
    lengths = None, None, query.shape[2], key.shape[2]
    return out, lse, *lengths, *_seeds(q, philox), q.new_empty(0)


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, philox_seed, philox_offset, *, scale=None, **_,
):  # fmt: skip
    dout, q, k, v, o = _heads_last(grad_out, query, key, value, out)
    philox = philox_seed.view(torch.int64) if dropout_p else None
    call = _sdpa(q, k, is_causal, scale, dropout_p)
    grads = call.backward(dout, q, k, v, o, logsumexp, philox)[:3]
    pairs = zip(_heads_last(*grads), (query, key, value), strict=True)
    return tuple(_strided_like(grad, x) for grad, x in pairs)


def _ragged(q, cu_q, cu_k, is_causal, scale, dropout_p, left, right, **others) -> _Call:
    """A call of the operators below varlen_attn: everything is aligned to the bottom right."""
    cu = tuple(None if x is None else x.to(torch.int32).contiguous() for x in (cu_q, cu_k))
    left, right = (-1 if side is None else side for side in (left, right))
    right = 0 if is_causal else right
    return _call(q, scale, dropout_p, left=left, right=right, cu_seqlens=cu, **others)


def _varlen_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
    seqused_k=None, alibi_slopes=None, block_table=None, **_,
):  # fmt: skip
    _no_debug_mask(return_debug_mask)
    if block_table is not None:
        raise NotImplementedError(
            "flash_attn: block_table is not implemented here; flash_attn_varlen_func has it"
        )
    call = _ragged(
        query, cum_seq_q, cum_seq_k, is_causal, scale, dropout_p, window_size_left,
        window_size_right, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    philox = _draw(query, dropout_p)
    out, lse = call.forward(query, key, value, philox)
    return _strided_like(out, query), lse, *_seeds(query, philox), query.new_empty(0)


def _varlen_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    **_,
):  # fmt: skip
    call = _ragged(
        query, cum_seq_q, cum_seq_k, is_causal, scale, dropout_p, window_size_left,
        window_size_right,
    )  # fmt: skip
    philox = rng_state.view(torch.int64) if dropout_p else None
    grads = call.backward(grad_out, query, key, value, out, logsumexp, philox)[:3]
    return tuple(map(_strided_like, grads, (query, key, value)))


def _efficient_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *,
    scale=None, **_,
):  # fmt: skip
    q, k, v = _heads_last(query, key, value)
    philox = _draw(q, dropout_p)
    call = _sdpa(q, k, is_causal, scale, dropout_p, attn_bias)
    out, lse = call.forward(q, k, v, philox)
    # The replaced operator's rows of lse are a multiple of 32 long.
    rows = -lse.shape[-1] % 32
    lse = torch.nn.functional.pad(lse, (0, rows)) if compute_log_sumexp else lse[..., :0]
    seed, offset = q.new_empty(2, dtype=torch.int64) if philox is None else philox
    return out.transpose(1, 2), lse.contiguous(), seed.clone(), offset.clone()


def _efficient_backward(
    grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
    grad_input_mask, is_causal=False, *, scale=None, **_,
):  # fmt: skip
    dout, q, k, v, o = _heads_last(grad_out, query, key, value, out)
    philox = torch.stack([philox_seed, philox_offset]) if dropout_p else None
    call = _sdpa(q, k, is_causal, scale, dropout_p, attn_bias)
    wants_bias = attn_bias is not None and grad_input_mask[3]
    lse = logsumexp[..., : q.shape[1]]
    *grads, dbias = call.backward(dout, q, k, v, o, lse, philox, 15 if wants_bias else 7)
    if not wants_bias:
        return *_heads_last(*grads), None
    # Keys that nothing sees are cut off; their bias has no gradient.
    rest = attn_bias.shape[-1] - dbias.shape[-1]
    dbias = torch.nn.functional.pad(dbias, (0, rest)).view(attn_bias.shape)
    return *_heads_last(*grads), dbias.to(attn_bias.dtype)


_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
_CUDA = {
    "_scaled_dot_product_flash_attention": _flash_forward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_forward": _varlen_forward,
    "_flash_attention_backward": _varlen_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
