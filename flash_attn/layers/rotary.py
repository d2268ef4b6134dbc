# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embedding (https://arxiv.org/abs/2104.09864), differentiable, under FlashAttention 2's
names.

`apply_rotary_emb` and its two in-place relatives run this package's operator in both directions:
the gradient of a rotation is the rotation back. `RotaryEmbedding` keeps the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.triton.rotary import apply_rotary


class _Rotation(torch.autograd.Function):
    """x to its position, or back (`conjugate`). Differentiable any number of times in x."""

    @staticmethod
    def forward(x, cos, sin, offsets, cu_seqlens, interleaved, conjugate):
        return apply_rotary(
            x, cos, sin, offsets, cu_seqlens, interleaved=interleaved, conjugate=conjugate
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, cos, sin, offsets, cu_seqlens, ctx.interleaved, ctx.conjugate = inputs
        ctx.offsets = None if isinstance(offsets, Tensor) else offsets
        saved = cos, sin, offsets if ctx.offsets is None else None, cu_seqlens
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx, grad):
        return _again(ctx, grad, not ctx.conjugate), None, None, None, None, None, None


class _EagerRotation(_Rotation):
    """With forward mode and vmap, which Dynamo does not trace."""

    generate_vmap_rule = True  # by the operator's own

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _again(ctx, tangent, ctx.conjugate)


def _rotated(*arguments) -> Tensor:
    kind = _Rotation if torch.compiler.is_compiling() else _EagerRotation
    return kind.apply(*arguments)


def _again(ctx, x: Tensor, conjugate: bool) -> Tensor:
    """x as ctx's input was rotated, or back."""
    cos, sin, offsets, cu_seqlens = ctx.saved_tensors
    offsets = offsets if ctx.offsets is None else ctx.offsets
    return _rotated(x, cos, sin, offsets, cu_seqlens, ctx.interleaved, conjugate)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first rotary_dim elements of each head to the row's position.

    Args:
        x: (batch, seqlen, num_heads, head_dim), or with cu_seqlens (total, num_heads, head_dim).
        cos: (positions, rotary_dim / 2), any floating dtype.
        sin: as cos.
        interleaved: pairs elements (0, 1), (2, 3), …; otherwise the two halves of rotary_dim.
        inplace: write into x and return it.
        seqlen_offsets: int, or (batch,) integers: the position of each sequence's first row.
        cu_seqlens: (batch + 1,) cumulative lengths of packed sequences.
        max_seqlen: not needed.
    Returns:
        As x.
    Raises as `flash_attn.ops.triton.rotary.apply_rotary`. Differentiable in x.
    """
    out = _rotated(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, False)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k of a packed tensor in place.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim), or with num_heads_q (batch, seqlen,
            num_heads_q + 2 * num_heads_k, head_dim).
        cos: (positions, rotary_dim / 2); sin likewise.
        sin: as cos.
        cos_k: tables of the keys where they differ (xPos); sin_k likewise.
        sin_k: as cos_k.
        interleaved: pairs elements (0, 1), (2, 3), …
        seqlen_offsets: int, or (batch,) integers.
        num_heads_q: query heads of a four-dimensional qkv.
    Returns:
        qkv.
    Differentiable in qkv, which must not be a leaf that requires a gradient.
    """
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(
                "flash_attn: qkv must have shape (batch, seqlen, 3, num_heads, head_dim), got "
                f"{tuple(qkv.shape)}"
            )
        heads_q = heads_k = qkv.shape[3]
        heads = qkv[:, :, :2].flatten(2, 3)
        place = qkv[:, :, :2]
    else:
        if qkv.dim() != 4 or num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                "flash_attn: qkv of four dimensions must have shape (batch, seqlen, num_heads_q + "
                f"2 * num_heads_k, head_dim) with num_heads_q given, got {tuple(qkv.shape)} and "
                f"num_heads_q={num_heads_q}"
            )
        heads_q, heads_k = num_heads_q, (qkv.shape[2] - num_heads_q) // 2
        heads = place = qkv[:, :, : heads_q + heads_k]
    options = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets}
    if cos_k is None and sin_k is None:
        turned = apply_rotary_emb(heads, cos, sin, **options)
    else:
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        q, k = heads.split((heads_q, heads_k), 2)
        turned = torch.cat(
            [
                apply_rotary_emb(q, cos, sin, **options),
                apply_rotary_emb(k, cos_k, sin_k, **options),
            ],
            2,
        )
    place.copy_(turned.view(place.shape))
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotates k of kv (batch, seqlen, 2, num_heads_k, head_dim) in place, and returns kv."""
    options = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets}
    apply_rotary_emb(kv[:, :, 0], cos, sin, inplace=True, **options)
    return kv


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(x1, x2) to (-x2, x1): halves of the last dimension, or interleaved pairs."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """`apply_rotary_emb` in plain torch, in the dtype of its inputs: what tests compare with.

    Args:
        x: (batch, seqlen, num_heads, head_dim).
        cos: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
        sin: as cos.
        interleaved: pairs elements (0, 1), (2, 3), …
    """
    width = 2 * cos.shape[-1]
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    turned, rest = x[..., :width], x[..., width:]
    turned = turned * cos[..., None, :] + rotate_half(turned, interleaved) * sin[..., None, :]
    return torch.cat((turned, rest), -1)


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k; keeps the tables for the longest sequence seen.

    Args:
        dim: rotary_dim, even.
        base: of the frequencies base ** (-2 i / dim).
        interleaved: pairs elements (0, 1), (2, 3), …; otherwise halves.
        scale_base: None, or xPos' (https://arxiv.org/abs/2212.10554): queries are scaled by
            scale ** ((position - centre) / scale_base) and keys by the inverse. The centre is the
            middle of the first table and stays there, so that keys in a cache keep their meaning.
        device: of the tables.
        pos_idx_in_fp32: accepted; positions are always counted in fp32.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device=None,
        *,
        pos_idx_in_fp32: bool = True,
    ):
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"flash_attn: dim must be even and positive, got {dim}")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        scale = None if scale_base is None else self._scales(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._centre: int | None = None  # xPos' position of scale 1
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _even(self, device) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _frequencies(self, device) -> Tensor:
        return self.base ** (-self._even(device) / self.dim)

    def _scales(self, device) -> Tensor:
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _apply(self, fn, recurse=True):
        """What was made on the meta device gets its values with its memory."""
        meta = self.inv_freq.is_meta
        super()._apply(fn, recurse)
        if meta and not self.inv_freq.is_meta:
            self.inv_freq.copy_(self._frequencies(self.inv_freq.device))
            if self.scale is not None:
                self.scale.copy_(self._scales(self.scale.device))
        return self

    def _update_cos_sin_cache(self, seqlen: int, device=None, dtype=None) -> None:
        """Makes the tables reach seqlen; they are made anew for another device or dtype."""
        self._tables(seqlen, device, dtype)

    def _tables(self, seqlen: int, device, dtype) -> tuple[Tensor, ...]:
        """cos and sin of the queries' and of the keys' rotation, (seqlen or more, dim / 2)."""
        # A graph that is exported makes its own: kept ones would bound its lengths.
        if self._cos_cached is not None and not torch.compiler.is_exporting():
            if seqlen <= self._seq_len_cached and _usable(self._cos_cached, device, dtype):
                return self._kept()
        cos, sin, cos_k, sin_k = made = self._make_tables(seqlen, device, dtype)
        if _lasting(cos):
            self._sin_cached, self._cos_cached = sin, cos
            if self.scale is not None:
                self._cos_k_cached, self._sin_k_cached = cos_k, sin_k
            # Last: another thread that sees it finds tables as long.
            self._seq_len_cached = seqlen
        return made

    def _kept(self) -> tuple[Tensor, ...]:
        tables = self._cos_cached, self._sin_cached
        if self.scale is None:
            return *tables, *tables
        return *tables, self._cos_k_cached, self._sin_k_cached

    def _make_tables(self, seqlen: int, device, dtype) -> tuple[Tensor, ...]:
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        # A cast of the module may have rounded them: then, and where they are still on the meta
        # device, they are made again.
        frequencies, scales = self.inv_freq, self.scale
        if frequencies.dtype != torch.float32 or frequencies.is_meta:
            frequencies, scales = self._frequencies(device), self._scales(device)
        angles = torch.outer(positions, frequencies.to(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            cos, sin = cos.to(dtype), sin.to(dtype)
            return cos, sin, cos, sin
        centre = seqlen // 2 if self._centre is None else self._centre
        if isinstance(centre, int):  # a symbolic one belongs to a graph
            self._centre = centre
        scale = scales.to(device) ** ((positions - centre) / self.scale_base)[:, None]
        tables = cos * scale, sin * scale, cos / scale, sin / scale
        return tuple(x.to(dtype) for x in tables)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place.

        Args:
            qkv: (batch, seqlen, 3, num_heads, head_dim); with num_heads_q (batch, seqlen,
                num_heads_q + 2 * num_heads_k, head_dim); with kv it is q alone, (batch, seqlen,
                num_heads, head_dim).
            kv: (batch, seqlen, 2, num_heads_k, head_dim).
            seqlen_offset: int, or (batch,) integers: the position of each first row.
            max_seqlen: how far the tables must reach; needed where seqlen_offset is a tensor and
                no earlier call has made them.
            num_heads_q: query heads of a four-dimensional qkv without kv.
        Returns:
            qkv, or (q, kv).
        """
        reach = max_seqlen
        if not isinstance(seqlen_offset, Tensor):
            reach = max(reach or 0, qkv.shape[1] + seqlen_offset)
        if reach is not None:
            cos, sin, cos_k, sin_k = self._tables(reach, qkv.device, qkv.dtype)
        elif self._cos_cached is not None:
            cos, sin, cos_k, sin_k = self._kept()
        else:
            raise ValueError(
                "flash_attn: max_seqlen must be given where seqlen_offset is a tensor, got None"
            )
        options = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            if self.scale is None:  # one table, one call
                cos_k = sin_k = None
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **options
            )
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, **options)


def _usable(table: Tensor, device, dtype) -> bool:
    """Whether a table that was kept serves now. Those of inference mode cannot be saved for a
    backward pass; Dynamo cannot ask."""
    if table.device != device or table.dtype != dtype:
        return False
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return True
    return not table.is_inference()


def _lasting(table: Tensor) -> bool:
    """Whether a tensor means something after this call: not a tracer's, nor one of a transform."""
    if type(table) is not Tensor:
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return torch.compiler.is_compiling() or not wrapped(table)
