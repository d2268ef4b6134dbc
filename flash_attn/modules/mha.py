# SPDX-License-Identifier: BSD-3-Clause
"""Multi-head attention as a module, with the interface of FlashAttention 2's `modules.mha`.

    FlashSelfAttention, FlashCrossAttention   attention alone, without parameters
    MHA                                       projections, rotary, GQA, KV cache

Parameters have FlashAttention 2's names, so its checkpoints load. What a row of attention means:
`flash_attn.flash_attn_func`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


def get_alibi_slopes(nheads: int) -> list[float]:
    """ALiBi's slopes: 2^(-8 / n), its square, … for a power of two n; for another number those of
    the power of two below, then every other one of twice that.

    Source: https://arxiv.org/abs/2108.12409
    """
    if nheads < 1:
        raise ValueError(f"flash_attn: nheads must be at least 1, got {nheads}")
    power = 2 ** int(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (i + 1) / power) for i in range(2 * power)]
    return slopes + between[0::2][: nheads - power]


class FlashSelfAttention(nn.Module):
    """softmax(q @ k.T * softmax_scale) @ v of packed q, k and v. Has no parameters.

    Args:
        causal: hides later keys.
        softmax_scale: float, default 1 / sqrt(head_dim).
        attention_dropout: on the probabilities, in training only.
        window_size: (left, right) in keys, -1 for unlimited.
        alibi_slopes: (num_heads,), float32, or None.
        deterministic: the same gradient bits each run.
    """

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
    ):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _apply(self, fn, recurse=True):
        """Slopes go where the module goes, but keep their dtype: the kernels read float32."""
        slopes = self.alibi_slopes
        super()._apply(fn, recurse)
        if slopes is not None and self.alibi_slopes.dtype != slopes.dtype:
            self.alibi_slopes = slopes.to(self.alibi_slopes.device)
        return self

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None, key_padding_mask=None):
        """Attention of one tensor.

        Args:
            qkv: (batch, seqlen, 3, num_heads, head_dim), or (total, 3, num_heads, head_dim) with
                cu_seqlens.
            causal: overrides the module's.
            cu_seqlens: (batch + 1,), int32, cumulative lengths of packed sequences.
            max_seqlen: not needed.
            key_padding_mask: (batch, seqlen) bool, True is visible. Not with cu_seqlens.
        Returns:
            (batch, seqlen, num_heads, head_dim) or (total, num_heads, head_dim).
        """
        q, k, v = _unpacked("qkv", qkv, 3)
        lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return _attend(self, q, k, v, causal, lengths, key_padding_mask)


class FlashCrossAttention(FlashSelfAttention):
    """softmax(q @ k.T * softmax_scale) @ v of queries and packed k and v. Has no parameters.

    The arguments are those of `FlashSelfAttention`. Causal and window are aligned to the bottom
    right.
    """

    def forward(
        self,
        q,
        kv,
        causal=None,
        cu_seqlens=None,
        max_seqlen=None,
        cu_seqlens_k=None,
        max_seqlen_k=None,
        key_padding_mask=None,
    ):
        """Attention of q to kv.

        Args:
            q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) with
                cu_seqlens.
            kv: (batch, seqlen_k, 2, num_heads_k, head_dim), or (total_k, 2, num_heads_k, head_dim).
            causal: overrides the module's.
            cu_seqlens: (batch + 1,), int32, cumulative lengths of packed queries.
            max_seqlen: not needed.
            cu_seqlens_k: the same of the keys.
            max_seqlen_k: not needed.
            key_padding_mask: (batch, seqlen_k) bool, True is visible. Not with cu_seqlens.
        Returns:
            (batch, seqlen_q, num_heads, head_dim) or (total_q, num_heads, head_dim).
        """
        k, v = _unpacked("kv", kv, 2)
        lengths = cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k
        return _attend(self, q, k, v, causal, lengths, key_padding_mask)


def _unpacked(name: str, packed: Tensor, parts: int) -> tuple[Tensor, ...]:
    if packed.dim() < 3 or packed.shape[-3] != parts:
        raise ValueError(
            f"flash_attn: {name} must have shape (…, {parts}, num_heads, head_dim), got "
            f"{tuple(packed.shape)}"
        )
    return packed.unbind(-3)


def _attend(module: FlashSelfAttention, q, k, v, causal, lengths, key_padding_mask) -> Tensor:
    options = {
        "dropout_p": module.drop.p if module.training else 0.0,
        "softmax_scale": module.softmax_scale,
        "causal": module.causal if causal is None else causal,
        "window_size": module.window_size,
        "alibi_slopes": module.alibi_slopes,
        "deterministic": module.deterministic,
    }
    if lengths[0] is None:
        if lengths[1] is not None:
            raise ValueError("flash_attn: cu_seqlens_k needs cu_seqlens")
        mask = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
        return flash_attn_func(q, k, v, **options, attn_bias=mask)
    if key_padding_mask is not None:
        raise ValueError("flash_attn: key_padding_mask and cu_seqlens exclude each other, got both")
    return flash_attn_varlen_func(q, k, v, *lengths, **options)


class SelfAttention(FlashSelfAttention):
    """`FlashSelfAttention` with the arguments of the class that FlashAttention 2 calls so."""

    def forward(self, qkv, causal=None, key_padding_mask=None):
        """(batch, seqlen, 3, num_heads, head_dim) -> (batch, seqlen, num_heads, head_dim)."""
        return super().forward(qkv, causal, key_padding_mask=key_padding_mask)


class CrossAttention(FlashCrossAttention):
    """`FlashCrossAttention` with the arguments of the class that FlashAttention 2 calls so."""

    def forward(self, q, kv, causal=None, key_padding_mask=None):
        """q (batch, seqlen_q, heads, head_dim), kv (batch, seqlen_k, 2, heads_k, head_dim)."""
        return super().forward(q, kv, causal, key_padding_mask=key_padding_mask)


class MHA(nn.Module):
    """Multi-head attention: input projection, rotary embedding, attention, output projection.

    Args:
        embed_dim: of inputs and outputs; num_heads divides it.
        num_heads: query heads.
        num_heads_kv: key and value heads, a divisor of num_heads; default num_heads.
        cross_attn: keys and values come from `x_kv`.
        qkv_proj_bias: the input projection has a bias.
        out_proj_bias: the output projection has a bias.
        dropout: on the probabilities, in training only.
        softmax_scale: float, default 1 / sqrt(head_dim).
        causal: hides later keys.
        layer_idx: this layer's entry among the caches; needed with `inference_params`.
        dwconv: a causal depthwise convolution of width 3 after the input projection.
        rotary_emb_dim: leading elements of each head that are rotated; 0 for none. Not with
            cross_attn.
        rotary_emb_base: of the angles.
        rotary_emb_scale_base: XPos scaling, or None.
        rotary_emb_interleaved: rotate elements (0, 1), (2, 3), …
        use_alibi: ALiBi with `get_alibi_slopes`.
        window_size: (left, right) in keys, -1 for unlimited.
        fused_bias_fc: accepted, changes nothing.
        use_flash_attn: accepted, changes nothing: this package's kernels always run.
        return_residual: return (out, x).
        checkpointing: recompute the attention in the backward pass.
        device: of the parameters.
        dtype: of the parameters.
    State: Wqkv (cross_attn: Wq, Wkv), out_proj, and with dwconv dwconv_qkv (dwconv_q, dwconv_kv).
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        num_heads_kv=None,
        cross_attn=False,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        dwconv=False,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        fused_bias_fc=False,
        use_flash_attn=False,
        return_residual=False,
        checkpointing=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        _check_heads(embed_dim, num_heads, num_heads_kv)
        if cross_attn and rotary_emb_dim > 0:
            raise NotImplementedError("flash_attn: rotary_emb_dim > 0 needs cross_attn=False")
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.dwconv, self.return_residual = dwconv, return_residual
        self.rotary_emb_dim = rotary_emb_dim
        self.checkpointing = checkpointing
        factory = {"device": device, "dtype": dtype}
        if rotary_emb_dim > 0:
            from ..layers.rotary import RotaryEmbedding

            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )
        kv_dim = 2 * self.head_dim * num_heads_kv
        widths = {"q": embed_dim, "kv": kv_dim} if cross_attn else {"qkv": embed_dim + kv_dim}
        for name, width in widths.items():
            projection = nn.Linear(embed_dim, width, bias=qkv_proj_bias, **factory)
            self.add_module(f"W{name}", projection)
            if dwconv:
                convolution = nn.Conv1d(width, width, 3, padding=2, groups=width, **factory)
                self.add_module(f"dwconv_{name}", convolution)
        slopes = None
        if use_alibi:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device, dtype=torch.float32)
        options = (causal, softmax_scale, dropout, window_size, slopes)
        self.inner_cross_attn = FlashCrossAttention(*options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **factory)

    def _apply(self, fn, recurse=True):
        """Slopes made on the meta device get their values with their memory."""
        before = self.inner_cross_attn.alibi_slopes
        super()._apply(fn, recurse)
        slopes = self.inner_cross_attn.alibi_slopes
        if before is not None and before.is_meta and not slopes.is_meta:
            slopes.copy_(slopes.new_tensor(get_alibi_slopes(self.num_heads)))
        return self

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None) -> Tensor:
        """A cache of keys and values, (batch_size, max_seqlen, 2, num_heads_kv, head_dim)."""
        like = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)

    def forward(
        self,
        x,
        x_kv=None,
        key_padding_mask=None,
        cu_seqlens=None,
        max_seqlen=None,
        mixer_subset=None,
        inference_params=None,
        *,
        causal=None,
        cu_seqlens_k=None,
        max_seqlen_k=None,
    ):
        """Attention of x to itself or to x_kv.

        Args:
            x: (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens.
            x_kv: (batch, seqlen_k, embed_dim), only with cross_attn; default x.
            key_padding_mask: (batch, seqlen_k) bool, True is visible. Not with cu_seqlens nor a
                cache.
            cu_seqlens: (batch + 1,), int32, cumulative lengths of packed sequences.
            max_seqlen: not needed.
            mixer_subset: indices of the rows of x that ask; only with cross_attn.
            inference_params: `flash_attn.utils.generation.InferenceParams` or alike: new keys are
                appended to the cache of `layer_idx`, without gradients.
            causal: overrides the module's; not with a cache.
            cu_seqlens_k: (batch + 1,), int32, cumulative lengths of packed keys, only with
                cross_attn and cu_seqlens; default cu_seqlens.
            max_seqlen_k: not needed.
        Returns:
            (batch, seqlen, embed_dim) or (total, embed_dim); with return_residual that and the
            input of the key projection.
        Raises:
            ValueError: arguments that exclude each other.
        """
        self._check_call(x_kv, key_padding_mask, cu_seqlens, mixer_subset, inference_params)
        if cu_seqlens_k is not None and (cu_seqlens is None or not self.cross_attn):
            raise ValueError("flash_attn: cu_seqlens_k needs cross_attn=True and cu_seqlens")
        if causal is not None and inference_params is not None:
            raise ValueError("flash_attn: inference_params excludes causal: set the module's")
        residual = x if x_kv is None else x_kv
        q, kv = self._project(x, residual, mixer_subset)
        if inference_params is not None:
            context = self._attend_cached(q, kv, inference_params)
        else:
            if self.rotary_emb_dim > 0:
                # No packed sequence is longer than all rows: nobody needs to look at cu_seqlens.
                reach = q.shape[1] if cu_seqlens is None else q.shape[0]
                q, kv = self._rotate(q, kv, 0, cu_seqlens, reach)
            lengths = cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k
            if cu_seqlens_k is None:
                lengths = (cu_seqlens, max_seqlen) * 2
            context = self._attend(q, kv, causal, lengths, key_padding_mask)
        out = self.out_proj(context.flatten(-2))
        return (out, residual) if self.return_residual else out

    def _check_call(self, x_kv, key_padding_mask, cu_seqlens, mixer_subset, inference_params):
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise ValueError("flash_attn: x_kv and mixer_subset need cross_attn=True")
        if inference_params is not None:
            if self.layer_idx is None:
                raise ValueError("flash_attn: inference_params needs layer_idx in the constructor")
            if key_padding_mask is not None or cu_seqlens is not None:
                raise ValueError(
                    "flash_attn: inference_params excludes key_padding_mask and cu_seqlens"
                )
        if mixer_subset is not None and cu_seqlens is not None:
            raise ValueError("flash_attn: mixer_subset and cu_seqlens exclude each other, got both")
        if self.dwconv and (inference_params is not None or cu_seqlens is not None):
            raise NotImplementedError(
                "flash_attn: dwconv needs whole sequences, without cu_seqlens and inference_params"
            )

    def _project(self, x, x_kv, mixer_subset) -> tuple[Tensor, Tensor]:
        """q (…, num_heads, head_dim) and kv (…, 2, num_heads_kv, head_dim)."""
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x_kv)
            if self.dwconv:
                q, kv = _convolve(self.dwconv_q, q), _convolve(self.dwconv_kv, kv)
        else:
            qkv = self.Wqkv(x)
            qkv = _convolve(self.dwconv_qkv, qkv) if self.dwconv else qkv
            q, kv = qkv.split([self.embed_dim, qkv.shape[-1] - self.embed_dim], -1)
        heads = q.unflatten(-1, (self.num_heads, self.head_dim))
        return heads, kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))

    def _attend(self, q, kv, causal, lengths, key_padding_mask) -> Tensor:
        arguments = (q, kv, causal, *lengths, key_padding_mask)
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(self.inner_cross_attn, *arguments, use_reentrant=False)
        return self.inner_cross_attn(*arguments)

    def _rotate(self, q, kv, offsets, cu_seqlens, reach: int):
        """q and kv with rotated queries and keys; offsets as in `apply_rotary_emb`; reach: no
        position is further."""
        from ..layers.rotary import apply_rotary_emb

        cos, sin, cos_k, sin_k = self.rotary_emb._tables(reach, q.device, q.dtype)
        k, v = kv.unbind(-3)
        options = {
            "interleaved": self.rotary_emb.interleaved,
            "seqlen_offsets": offsets,
            "cu_seqlens": cu_seqlens,
        }
        q = apply_rotary_emb(q, cos, sin, **options)
        k = apply_rotary_emb(k, cos_k, sin_k, **options)
        return q, torch.stack([k, v], -3)

    @torch.no_grad()
    def _attend_cached(self, q, kv, state) -> Tensor:
        """Appends kv to this layer's cache and attends to all that is in it."""
        first = state.batch_size_offset
        entries = slice(first, first + q.shape[0])
        caches = state.key_value_memory_dict
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(
                state.max_batch_size, state.max_seqlen, kv.dtype
            )
        cache = caches[self.layer_idx][entries]
        lengths = state.lengths_per_sample
        lengths = state.seqlen_offset if lengths is None else lengths[entries]
        cos = sin = None
        if self.rotary_emb_dim > 0:
            # The cache's own rotation places each query only under causal, and knows no XPos.
            if self.causal and self.rotary_emb.scale is None:
                # In its dtype, to which autocast takes the queries.
                reach = state.max_seqlen, cache.device, cache.dtype
                cos, sin = self.rotary_emb._tables(*reach)[:2]
            else:
                q, kv = self._rotate(q, kv, lengths, None, state.max_seqlen)
        inner = self.inner_cross_attn
        return flash_attn_with_kvcache(
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            kv[:, :, 0],
            kv[:, :, 1],
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=lengths,
            softmax_scale=inner.softmax_scale,
            causal=inner.causal,
            window_size=inner.window_size,
            rotary_interleaved=self.rotary_emb.interleaved if cos is not None else False,
            alibi_slopes=inner.alibi_slopes,
        )


def _check_heads(embed_dim, num_heads, num_heads_kv):
    for name, whole, part in (
        ("num_heads must divide embed_dim", embed_dim, num_heads),
        ("num_heads_kv must divide num_heads", num_heads, num_heads_kv),
    ):
        if part < 1 or whole % part:
            raise ValueError(f"flash_attn: {name}, got {part} and {whole}")


def _convolve(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """A causal convolution over (batch, seqlen, width)."""
    return convolution(x.transpose(1, 2))[..., :-2].transpose(1, 2).contiguous()
