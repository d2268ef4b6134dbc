# SPDX-License-Identifier: BSD-3-Clause
"""torch.nn.MultiheadAttention on this package's kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interface import flash_attn_func, flash_attn_varlen_func


class MultiheadAttention(torch.nn.MultiheadAttention):
    """A drop-in for torch.nn.MultiheadAttention: same constructor, parameters and state_dict.

    Call it with need_weights=False: then it runs in memory linear in the lengths, whatever the
    masks, and a padding mask is never expanded to (queries, keys). Weights are of quadratic size,
    so need_weights=True (the default, as in torch) is torch's own implementation, and costs that
    memory.

    Differences from torch, all at need_weights=False:

    - A query that sees no key gives the projection of 0 (torch: NaN in some of its paths).
    - A boolean mask and a float mask may be mixed.
    - is_causal=True needs no attn_mask where seqlen_q = seqlen_k. With one it is torch's hint: the
      mask is the causal one and need not be read.
    - Nested tensors (batch_first, no masks; strided or jagged) work in training too.

    The parts of torch.nn.Transformer call their attention with need_weights=False. In evaluation
    without gradients TransformerEncoderLayer may bypass it, as any attention module, for a fused
    kernel of torch's: torch.backends.mha.set_fastpath_enabled(False) prevents that.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of projected queries to projected keys and values.

        Args:
            query: (seqlen_q, batch, embed_dim), with batch_first (batch, seqlen_q, embed_dim), or
                without a batch (seqlen_q, embed_dim); or a nested tensor.
            key: (seqlen_k, batch, kdim) likewise.
            value: (seqlen_k, batch, vdim) likewise.
            key_padding_mask: (batch, seqlen_k), without a batch (seqlen_k,); bool, True is hidden,
                or float, added to the scores.
            need_weights: return the weights too; torch's implementation, quadratic memory.
            attn_mask: (seqlen_q, seqlen_k) or (batch * num_heads, seqlen_q, seqlen_k); bool, True
                is hidden, or float, added to the scores.
            average_attn_weights: the mean of the heads' weights. Only with need_weights.
            is_causal: attn_mask is the causal mask.
        Returns:
            out: as query, with embed_dim.
            weights: None, or with need_weights (batch, seqlen_q, seqlen_k), or (batch, num_heads,
                seqlen_q, seqlen_k) where they are not averaged.
        Raises:
            ValueError: shapes.  TypeError: dtypes.
            NotImplementedError: no compiled kernel fits; the message lists why.
        Differentiable in everything, float masks included.
        Source: https://arxiv.org/abs/1706.03762
        """
        if need_weights:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        if query.is_nested or key.is_nested or value.is_nested:
            if not self.batch_first or key_padding_mask is not None or attn_mask is not None:
                raise ValueError(
                    "flash_attn: nested tensors need batch_first=True, and no key_padding_mask "
                    "and attn_mask"
                )
            return self._nested(query, key, value, is_causal), None
        rank = query.dim()
        if rank not in (2, 3) or key.dim() != rank or value.dim() != rank:
            raise ValueError(
                "flash_attn: query, key and value must all be 3-D, or 2-D without a batch, got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        q, k, v = self._project(query, key, value)
        if rank == 2:
            if key_padding_mask is not None:
                if key_padding_mask.shape != key.shape[:1]:
                    _shape_error("key_padding_mask", f"({len(key)},)", key_padding_mask)
                key_padding_mask = key_padding_mask[None]
            q, k, v = q[None], k[None], v[None]
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = self._attend(q, k, v, key_padding_mask, attn_mask, is_causal)
        out = F.linear(out, self.out_proj.weight, self.out_proj.bias)
        if rank == 2:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v with embed_dim as their last dimension; one product for equal inputs."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _attend(self, q, k, v, key_padding_mask, attn_mask, is_causal) -> Tensor:
        """(batch, seqlen_q, embed_dim) of (batch, seqlen, embed_dim) each."""
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        extra = 0
        if self.bias_k is not None:
            k, v = (
                torch.cat([x, bias.to(x.dtype).expand(x.shape[0], -1, -1)], 1)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        # The columns added here are visible to all, which the kernels' causal mask cannot say.
        causal = is_causal and extra == 0 and seqlen_q == seqlen_k
        if is_causal and not causal and attn_mask is None:
            raise ValueError(
                "flash_attn: is_causal needs an attn_mask unless seqlen_q = seqlen_k and there are "
                f"neither add_bias_kv nor add_zero_attn, got {seqlen_q} and {seqlen_k}"
            )
        shape = batch, self.num_heads, seqlen_q, seqlen_k
        if causal:
            attn_mask = None
        out = flash_attn_func(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            dropout_p=self.dropout if self.training else 0.0,
            causal=causal,
            attn_bias=_bias(key_padding_mask, attn_mask, shape, extra, q.dtype),
        )
        return out.flatten(2)

    def _nested(self, query, key, value, is_causal) -> Tensor:
        """The packed form, for nested tensors."""
        if self.bias_k is not None or self.add_zero_attn:
            raise NotImplementedError(
                "flash_attn: nested tensors with add_bias_kv or add_zero_attn are not implemented"
            )
        rows, cu_q = _packed(query)
        if key is query and value is query:
            q, k, v = self._project(rows, rows, rows)
            cu_k = cu_q
        else:
            (key_rows, cu_k), (value_rows, cu_v) = _packed(key), _packed(value)
            if not torch.equal(cu_k, cu_v):
                raise ValueError("flash_attn: nested key and value must have the same lengths")
            if is_causal and not torch.equal(cu_q, cu_k):
                raise ValueError(
                    "flash_attn: is_causal needs seqlen_q = seqlen_k in every nested sequence"
                )
            q, k, v = self._project(rows, key_rows, value_rows)
        out = flash_attn_varlen_func(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            cu_q,
            cu_k,
            dropout_p=self.dropout if self.training else 0.0,
            causal=is_causal,
        )
        out = F.linear(out.flatten(1), self.out_proj.weight, self.out_proj.bias)
        return _nested_like(query, out)


def _bias(key_padding_mask, attn_mask, shape, extra, dtype) -> Tensor | None:
    """One attn_bias of both masks, without the dimensions that neither has.

    shape: (batch, num_heads, seqlen_q, seqlen_k). extra: visible columns to put at the end.
    """
    batch, heads, rows, columns = shape
    masks = []
    if key_padding_mask is not None:
        if key_padding_mask.shape != (batch, columns):
            _shape_error("key_padding_mask", f"{(batch, columns)}", key_padding_mask)
        masks.append(key_padding_mask[:, None, None, :])
    if attn_mask is not None:
        flat, whole = (rows, columns), (batch * heads, rows, columns)
        if attn_mask.shape not in (flat, whole):
            _shape_error("attn_mask", f"{flat} or {whole}", attn_mask)
        folded = attn_mask.dim() == 3
        masks.append(attn_mask.unflatten(0, (batch, heads)) if folded else attn_mask[None, None])
    if not masks:
        return None
    first, *others = masks
    if all(mask.dtype == torch.bool for mask in masks):
        visible = ~(first | others[0] if others else first)
        return F.pad(visible, (0, extra), value=True) if extra else visible
    total = _added(first, dtype)
    for mask in others:
        total = total + _added(mask, dtype)
    return F.pad(total, (0, extra)) if extra else total


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of either kind as numbers to add, in a dtype that the kernels take beside `dtype`."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise TypeError(f"flash_attn: masks must be bool or floating-point, got {mask.dtype}")
    return mask if mask.dtype == torch.float32 and dtype != torch.float64 else mask.to(dtype)


def _shape_error(name: str, allowed: str, mask: Tensor):
    raise ValueError(f"flash_attn: {name} must have shape {allowed}, got {tuple(mask.shape)}")


def _packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (total, width) and cumulative lengths of a nested tensor (batch, ragged, width)."""
    if not x.is_nested:
        lengths = torch.full((x.shape[0],), x.shape[1], device=x.device)
        return x.flatten(0, 1), F.pad(lengths.cumsum(0), (1, 0))
    if x.layout is torch.jagged and x.lengths() is None:
        return x.values(), x.offsets()
    parts = x.unbind()
    lengths = torch.tensor([0, *(len(part) for part in parts)])
    return torch.cat(parts), lengths.cumsum(0).to(x.device)


def _nested_like(x: Tensor, rows: Tensor) -> Tensor:
    """The inverse of `_packed`, in the layout of x."""
    if not x.is_nested:
        return rows.unflatten(0, (x.shape[0], x.shape[1]))
    if x.layout is torch.jagged and x.lengths() is None:
        return torch.nested.nested_tensor_from_jagged(rows, x.offsets())
    pieces = rows.split([len(part) for part in x.unbind()])
    return torch.nested.as_nested_tensor(list(pieces), layout=x.layout)
