# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face transformers (>= 5.17): registers this package as an attention implementation.

    from flash_attn.integrations.transformers import register
    model = GPT2LMHeadModel.from_pretrained(…, attn_implementation=register())

Works on every device that the kernels work on, the CPU included, in every dtype of theirs. Two
functions are registered under one name: the attention, and the maker of its masks (without a maker
transformers drops the padding in silence). The maker gives the cheapest mask that says the same:

    None             causal or unmasked, nothing padded: the kernels' own mask
    (batch, keys)    causal, padding alone, bool: a bias that is never expanded to (queries, keys)
    4-D, int32       a sliding window: (batch, 1, 1, keys), 0 where padded, else the window; or,
                     with nothing padded, (1, 1, 1, 1). Some models say their window nowhere else,
                     and transformers hands a 4-D mask on as it is
    4-D, bool        (batch, 1, 1, keys): padding of an unmasked pass, since layers that do not say
                     whether they are causal count as causal; and anything else (packed positions,
                     static caches, overlays)

Another 4-D mask, boolean or additive, says everything: causal and window are then not applied
again.
Without a mask, packed rows may come with their lengths (`cu_seq_lens_q`, `cu_seq_lens_k`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..interface import flash_attn_func, flash_attn_varlen_func

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )
except ImportError as error:
    raise ImportError(
        "flash_attn.integrations.transformers needs transformers >= 5.17: "
        f"pip install 'flash-attn[hf]' ({error})"
    ) from error

# transformers takes a name with one of these for an implementation of its own or a hub kernel.
_RESERVED = ("flash", "sdpa", "flex_attention", "eager", "paged", "/", "|")


# Functions of the kinds that a sliding window's mask function is made of.
_BOTH = sliding_window_causal_mask_function(1)
_OVERLAY = _BOTH.__closure__[0].cell_contents[0]


def register(name: str = "exact_attention") -> str:
    """Registers the attention and its mask maker with transformers.

    Args:
        name: what to give as `attn_implementation`. Must not contain "flash", "sdpa",
            "flex_attention", "eager", "paged", "/" or "|".
    Returns:
        The name.
    Raises:
        ValueError: transformers would take the name for something else.  TypeError: no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"flash_attn: name must be a str, got {type(name).__name__}")
    clash = [word for word in _RESERVED if word in name]
    if clash or not name:
        raise ValueError(
            f"flash_attn: name must not be empty nor contain {', '.join(map(repr, _RESERVED))} "
            f"(transformers treats such names as its own), got {name!r}"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    return name


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **others,
) -> Tensor | None:
    """The mask of one forward pass, as transformers asks for it.

    Args:
        batch_size: of the inputs.
        q_length: queries of this pass.
        kv_length: keys, those of the cache included.
        q_offset: position of the first query; a tensor when the cache is static.
        kv_offset: position of the first key.
        mask_function: (batch, head, query, key) -> visible.
        attention_mask: (batch, seen tokens), True where a token is real.
        **others: what only a 4-D mask needs.
    Returns:
        One of the masks at the top of this file.
    """
    window = _sliding_window(mask_function)
    causal = mask_function is causal_mask_function or window is not None
    # Our causal mask is aligned to the last query and the last key: those must be one position.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if (causal and aligned) or mask_function is bidirectional_mask_function:
        padding = None
        if attention_mask is not None:
            padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if padding is None or padding.shape[1] == kv_length:
            if padding is not None and _readable(padding) and bool(padding.all()):
                padding = None
            if padding is not None and not causal:
                return padding[:, None, None, :]
            if window is None or (padding is None and window >= kv_length):
                return padding
            if padding is not None:
                return padding.int()[:, None, None, :] * window
            device = others.get("device", "cpu")
            return torch.full((1, 1, 1, 1), window, dtype=torch.int32, device=device)
    others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **others,
    )


def _sliding_window(mask_function: Callable) -> int | None:
    """The window of what `sliding_window_causal_mask_function` made, untouched since; else None."""
    if torch.compiler.is_compiling():  # closures do not open while tracing
        return None
    parts = _cells(mask_function, _BOTH)
    if not parts or len(parts[0]) != 2 or parts[0][1] is not causal_mask_function:
        return None
    window = _cells(parts[0][0], _OVERLAY)
    return window[0] if window and isinstance(window[0], int) else None


def _cells(function: Callable, made_like: Callable) -> list | None:
    """What a function closes over, if it has the code of another."""
    if getattr(function, "__code__", None) is not made_like.__code__:
        return None
    return [cell.cell_contents for cell in function.__closure__]


def _readable(mask: Tensor) -> bool:
    """Whether the host may look into a mask: once a forward pass, as transformers does itself."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """One attention layer, as transformers calls it.

    Args:
        module: the layer; its `is_causal` counts unless the argument is given.
        query: (batch, num_heads, seqlen_q, head_dim), any strides.
        key: (batch, num_heads_k, seqlen_k, head_dim), not repeated for grouped heads.
        value: (batch, num_heads_k, seqlen_k, head_dim_v).
        attention_mask: what `make_mask` gave, or a 4-D mask of the user's, boolean or additive.
        dropout: 0 in evaluation.
        scaling: default 1 / sqrt(head_dim).
        sliding_window: visible keys, the query's own included.
        softcap: None is off.
        is_causal: overrides module.is_causal.
        s_aux: (num_heads,), attention sinks.
        position_bias: (batch or 1, num_heads, seqlen_q, seqlen_k), added to the scores.
        cu_seq_lens_q: (sequences + 1,), lengths of packed rows; used when there is no mask.
        cu_seq_lens_k: likewise, of the keys.
        **others: of other implementations; nothing that changes the result.
    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), and None for the weights, which do not exist.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window, bias = (-1, -1), attention_mask
    if bias is not None and bias.dtype == torch.int32:
        if sliding_window is None:  # the few models that do not tell the layer; synchronises
            sliding_window = int(bias.max())
        bias = None if bias.shape[-1] == 1 else bias[:, 0, 0] != 0
    if bias is not None and bias.dim() == 4:
        causal = False
        bias = bias[..., : key.shape[2]]
        if bias.is_floating_point() and bias.dtype != torch.float32:
            bias = bias.to(query.dtype)
    else:
        if bias is not None:
            bias = bias[:, None, None, :]
        if sliding_window is not None:
            window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    options = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "attn_bias": _combine(bias, position_bias, query),
        "s_aux": s_aux,
    }
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if cu_seq_lens_q is None or cu_seq_lens_k is None or attention_mask is not None:
        return flash_attn_func(q, k, v, **options), None
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = flash_attn_varlen_func(q, k, v, cu_seq_lens_q, cu_seq_lens_k, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _combine(mask: Tensor | None, bias: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask and a position bias as one attn_bias."""
    if bias is None:
        return mask
    bias = bias.to(query.dtype)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
