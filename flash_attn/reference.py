# SPDX-License-Identifier: BSD-3-Clause
"""The oracle: every feature of the package in plain torch, slow, readable, quadratic in memory.

What the tests compare the kernels with, and what `backend="reference"` runs. It works on every
device and dtype, under every transform of torch (forward mode, double backward, vmap), and at any
precision:

    out, lse = attention(q, k, v, causal=True)                              # as the kernels: fp32
    inside out, lse = attention(q, k, v, causal=True, compute_dtype=torch.float64) # the exact
    answer out, lse = attention(q, k, v, causal=True, compute_dtype=q.dtype)       # the
    low-precision yardstick

Ragged batches (packed, live lengths, caches) are evaluated one sequence at a time, which reads the
lengths on the host: on a GPU that synchronises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import _contents
from ._philox import keep_below, keep_mask
from .masks import LONGEST, BlockMask


@dataclass
class Problem:
    """The arguments of one call, checked and completed; the names are those of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float
    window: tuple[int, int]
    alibi_slopes: Tensor | None
    bias: Tensor | None  # 4-D, additive or bool
    sinks: Tensor | None
    blocks: BlockMask | None
    keep_below: int
    philox: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    cache_batch_idx: Tensor | None
    block_table: Tensor | None
    dtype: torch.dtype  # of the arithmetic

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def stats_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Sequence(NamedTuple):
    """Queries and live keys of one batch entry, or of all when they have the same lengths."""

    batch: slice  # which rows of bias, slopes and block masks
    q: Tensor  # (batch, q_len, heads, head_dim)
    k: Tensor  # (batch, k_len - k_first, heads_k, head_dim)
    v: Tensor
    k_first: int  # slot of the first key; slots are what positions count
    k_len: int  # slot after the last key
    present: Tensor | None  # (k_len - k_first,) False where a page is missing
    q_first: int  # position of the first query; there may be more before it and after
    q_len: int  # queries of the whole sequence


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    block_mask=None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as the package means it, differentiable by autograd in every floating input.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) with
            cu_seqlens_q.
        k: (batch, seqlen_k, num_heads_k, head_dim); packed with cu_seqlens_k; pages with
            block_table.
        v: as k, with head_dim_v.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: hide keys after the bottom-right diagonal.
        window_size: (left, right) in keys, -1 for unlimited.
        softcap: 0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads).
        attn_bias: broadcastable to (batch, num_heads, seqlen_q, seqlen_k); bool is a mask.
        learnable_sink: (num_heads,), one more logit in the denominator.
        block_mask: a `flash_attn.BlockMask`.
        dropout_p: needs philox when positive.
        philox: (2,) int64, seed and offset.
        cu_seqlens_q: (batch + 1,) packed queries.
        cu_seqlens_k: (batch + 1,) packed keys.
        seqused_k: (batch,) live length of each key sequence.
        leftpad_k: (batch,) first live slot.
        cache_batch_idx: (batch,) which cache entry serves a batch.
        block_table: (batch, max_pages), pages of a cache; -1 is no page.
        compute_dtype: of the arithmetic and of `out`; default fp32 (fp64 for fp64), `out` in q's
            dtype.
    Returns:
        out: (batch, seqlen_q, num_heads, head_dim_v) or (total_q, num_heads, head_dim_v).
        lse: (batch, num_heads, seqlen_q) or (num_heads, total_q), fp32 (fp64 when computed in
            fp64).
    """
    problem = make_problem(**locals())
    outs, lses = [], []
    with torch.autocast(q.device.type, enabled=False):
        for sequence in sequences(problem):
            out, lse = attend_sequence(problem, sequence)
            outs.append(out)
            lses.append(lse)
    out = gather_rows(problem, outs, 1, 0.0).to(compute_dtype or q.dtype)
    return out, gather_rows(problem, lses, 2, float("-inf"))


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    **arguments,
) -> dict[str, Tensor]:
    """Gradients by the formulas of the kernels, from a rounded `out` and `lse`, in `compute_dtype`.

    A yardstick for the tests: delta = rowsum(out * dout) of a rounded out costs accuracy that
    autograd through `attention` does not lose. `arguments` are those of `attention`. Returns a dict
    with the keys q, k, v and, for the inputs that were given, attn_bias, alibi_slopes,
    learnable_sink.
    """
    leaves = {"q": q, "k": k, "v": v}
    for name in ("attn_bias", "alibi_slopes", "learnable_sink"):
        tensor = arguments.get(name)
        if tensor is not None and tensor.is_floating_point():
            leaves[name] = tensor
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    grads = {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        problem = make_problem(**{**arguments, **leaves})
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        begin = 0
        for sequence in sequences(problem):
            batch, q_len = sequence.q.shape[:2]
            if problem.packed:
                rows = slice(begin, begin + q_len)
                begin += q_len
                piece = out[None, rows], dout[None, rows], lse[None, :, rows], dlse[None, :, rows]
            else:
                piece = tuple(x[sequence.batch] for x in (out, dout, lse, dlse))
            for name, grad in _sequence_backward(problem, sequence, leaves, *piece).items():
                grads[name] += grad
    return grads


def dropout_scores(**arguments) -> Tensor:
    """What `return_attn_probs` hands out: exp(s - the row's maximum), negative where dropped, q's
    dtype.

    Takes the arguments of `attention` by name. Returns (batch, num_heads, longest seqlen_q, longest
    seqlen_k), 0 where nothing is visible. Costs memory of that size.
    """
    problem = make_problem(**arguments)
    pieces = []
    for sequence in sequences(problem):
        weights, visible = _scores(problem, sequence)
        if weights.shape[-1]:
            lowest = torch.finfo(weights.dtype).min
            top = weights.masked_fill(~visible, lowest).amax(-1, keepdim=True)
            weights = torch.where(visible, (weights - top).exp(), 0.0)
        weights = weights.to(problem.q.dtype)
        keep = _keep(problem, sequence)
        # A dropped weight that underflowed must stay negative, or its place would read as kept.
        dropped = -weights.clamp_min(torch.finfo(weights.dtype).tiny)
        pieces.append(torch.where(visible & ~keep, dropped, weights))
    if not pieces:
        return problem.q.new_zeros(0, problem.q.shape[-2], 0, 0)
    rows, columns = (max(piece.shape[axis] for piece in pieces) for axis in (2, 3))
    return torch.cat([_pad_to(piece, rows, columns) for piece in pieces])


def _get_block_size_n(device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """FlashAttention 2's tests ask by this name how many columns of S_dmask share a maximum.

    There, each tile of columns is taken against the running maximum of its tile. Here, the weights
    of a row are taken against the whole row's maximum: one block, longer than any row.
    """
    return LONGEST


def from_operator(arguments: tuple, block_mask) -> dict:
    """Arguments of the operator `forward`, in its order, as keywords for `attention`.

    block_mask: the BlockMask whose lists stand among them, or None.
    """
    q, k, v, cu_q, cu_k, used, leftpad, index, table, bias, slopes, sinks = arguments[:12]
    philox, scale, softcap, dropout_p, left, right = arguments[19:25]
    return dict(
        q=q,
        k=k,
        v=v,
        softmax_scale=scale,
        window_size=(left, right),
        softcap=softcap,
        alibi_slopes=slopes,
        attn_bias=bias,
        learnable_sink=sinks,
        block_mask=block_mask,
        dropout_p=dropout_p,
        philox=philox,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        seqused_k=used,
        leftpad_k=leftpad,
        cache_batch_idx=index,
        block_table=table,
    )


def make_problem(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    attn_bias=None,
    learnable_sink=None,
    block_mask=None,
    dropout_p=0.0,
    philox=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_k=None,
    leftpad_k=None,
    cache_batch_idx=None,
    block_table=None,
    compute_dtype=None,
) -> Problem:
    dtype = compute_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    while attn_bias is not None and attn_bias.dim() < 4:
        attn_bias = attn_bias[None]
    below = keep_below(dropout_p)
    if below < 65536 and philox is None:
        raise ValueError(
            "flash_attn: philox must hold a seed and an offset when dropout_p > 0, got None"
        )
    left, right = (int(side) for side in window_size)
    return Problem(
        q=q,
        k=k,
        v=v,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        softcap=float(softcap),
        window=(left, 0 if causal else right),
        alibi_slopes=alibi_slopes,
        bias=attn_bias,
        sinks=learnable_sink,
        blocks=None if block_mask is None else block_mask.to(q.device),
        keep_below=below,
        philox=philox,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        dtype=dtype,
    )


def sequences(problem: Problem) -> Iterator[Sequence]:
    """One entry for a dense batch, else one a sequence."""
    p = problem
    ragged = (p.cu_seqlens_k, p.seqused_k, p.leftpad_k, p.cache_batch_idx, p.block_table)
    if not p.packed and all(x is None for x in ragged):
        yield Sequence(slice(None), p.q, p.k, p.v, 0, p.k.shape[1], None, 0, p.q.shape[1])
        return
    paged = p.block_table is not None
    lengths = p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_k, p.leftpad_k, p.cache_batch_idx
    _contents.lengths(p.q, p.k, *lengths, p.block_table)
    cu_q, cu_k, used, leftpad, index = (None if x is None else x.tolist() for x in lengths)
    for b in range(len(cu_q) - 1 if cu_q is not None else p.q.shape[0]):
        q = p.q[b : b + 1] if cu_q is None else p.q[None, cu_q[b] : cu_q[b + 1]]
        if paged:
            k, v = p.k, p.v
            k_len = k.shape[1] * p.block_table.shape[1] if cu_k is None else cu_k[b + 1] - cu_k[b]
        elif cu_k is not None:
            k, v = (x[cu_k[b] : cu_k[b + 1]] for x in (p.k, p.v))
            k_len = k.shape[0]
        else:
            entry = b if index is None else index[b]
            k, v = p.k[entry], p.v[entry]
            k_len = k.shape[0]
        k_len = k_len if used is None else used[b]
        if paged and not bool((p.block_table[b] >= 0).any()):
            k_len = 0  # a sequence without pages pads the batch: its length means nothing
        k_first = 0 if leftpad is None else min(leftpad[b], k_len)
        present = None
        if paged:
            slots = torch.arange(k_first, k_len, device=k.device)
            pages = p.block_table[b].long()[slots // p.k.shape[1]]
            present = pages >= 0
            place = pages.clamp_min(0), slots % p.k.shape[1]
            k, v = (torch.where(present[:, None, None], x[place], 0) for x in (k, v))
        else:
            k, v = k[k_first:k_len], v[k_first:k_len]
        place = k_first, k_len, present, 0, q.shape[1]
        yield Sequence(slice(b, b + 1), q, k[None], v[None], *place)


def _scores(problem: Problem, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Scaled, capped, biased scores (batch, heads, q_len, keys) and what of them is visible."""
    p = problem
    q, k = sequence.q.to(p.dtype).transpose(1, 2), sequence.k.to(p.dtype).transpose(1, 2)
    group = q.shape[1] // max(k.shape[1], 1)
    scores = (q @ k.repeat_interleave(group, 1).transpose(2, 3)) * p.scale
    if p.softcap > 0:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    q_len, rows_end = sequence.q_len, sequence.q_first + q.shape[2]
    i = torch.arange(sequence.q_first, rows_end, device=q.device)[:, None]
    j = torch.arange(sequence.k_first, sequence.k_len, device=q.device)[None, :]
    shift = sequence.k_len - q_len
    if p.alibi_slopes is not None:
        slopes = p.alibi_slopes if p.alibi_slopes.dim() == 1 else p.alibi_slopes[sequence.batch]
        scores = scores - slopes.to(p.dtype)[..., None, None] * (i + shift - j).abs()
    left, right = p.window
    visible = torch.ones(1, 1, len(i), j.shape[1], dtype=torch.bool, device=q.device)
    if left >= 0:
        visible = visible & (j >= i + shift - left)
    if right >= 0:
        visible = visible & (j <= i + shift + right)
    if sequence.present is not None:
        visible = visible & sequence.present
    if p.blocks is not None:
        rows, columns = (
            count * size
            for count, size in zip(p.blocks.shape[2:], p.blocks.block_size, strict=True)
        )
        if (i.numel() and q_len > rows) or (j.numel() and sequence.k_len > columns):
            raise ValueError(
                f"flash_attn: block_mask has {p.blocks.shape[2:]} blocks of {p.blocks.block_size}, "
                f"too few for a sequence of {q_len} queries and {sequence.k_len} keys"
            )
        visible = visible & _of_batch(p.blocks.visible(i[:, 0], j[0]), sequence.batch)
    if p.bias is not None:
        bias = _of_batch(p.bias, sequence.batch)
        if bias.shape[2] != 1:
            bias = _slice(bias, 2, sequence.q_first, rows_end)
        if bias.shape[3] != 1:
            bias = _slice(bias, 3, sequence.k_first, sequence.k_len)
        if bias.dtype == torch.bool:
            visible = visible & bias
        else:
            scores = scores + bias.to(p.dtype)
            visible = visible & (bias != float("-inf"))
    return scores, visible.expand_as(scores)


def _of_batch(x: Tensor, batch: slice) -> Tensor:
    return x if x.shape[0] == 1 else x[batch]


def _slice(bias: Tensor, dim: int, begin: int, end: int) -> Tensor:
    if end > bias.shape[dim]:
        raise ValueError(
            f"flash_attn: attn_bias.shape[{dim}] must be 1 or at least the longest sequence, "
            f"{end}, "
            f"got {bias.shape[dim]}"
        )
    return bias.narrow(dim, begin, end - begin)


def _keep(problem: Problem, sequence: Sequence) -> Tensor:
    """Which probabilities dropout keeps, (batch, heads, q_len, keys)."""
    batch, rows, heads = sequence.q.shape[:3]
    if problem.keep_below == 65536:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=sequence.q.device)
    first = sequence.batch.start or 0
    rows = torch.arange(rows, device=sequence.q.device) + sequence.q_first
    columns = torch.arange(sequence.k_first, sequence.k_len, device=sequence.q.device)
    return keep_mask(
        problem.philox, problem.keep_below, range(first, first + batch), heads, rows, columns
    )


def attend_sequence(problem: Problem, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """out (batch, q_len, heads, head_dim_v) and lse (batch, heads, q_len) of one sequence."""
    scores, visible = _scores(problem, sequence)
    keys = scores.shape[-1]
    scores = torch.where(visible, scores, float("-inf"))
    if problem.sinks is not None:
        sinks = problem.sinks.to(problem.dtype)[None, :, None, None]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    # Rows without any weight go through softmax as zeros, so that no NaN arises to reach a
    # gradient.
    alive = (scores != float("-inf")).any(-1, keepdim=True)
    safe = torch.where(alive, scores, 0.0)
    lse = torch.logsumexp(safe.to(problem.stats_dtype), -1)
    lse = torch.where(alive[..., 0], lse, float("-inf"))
    p = torch.where(alive, torch.softmax(safe, -1), 0.0)[..., :keys]
    if problem.keep_below < 65536:
        p = torch.where(_keep(problem, sequence), p * (65536 / problem.keep_below), 0.0)
    v = sequence.v.to(problem.dtype).transpose(1, 2)
    v = v.repeat_interleave(scores.shape[1] // max(v.shape[1], 1), 1)
    return (p @ v).transpose(1, 2), lse


def _sequence_backward(problem, sequence, leaves, out, dout, lse, dlse) -> dict[str, Tensor]:
    """The gradients that one sequence gives to the leaves: ds by the formula, what follows by
    autograd."""
    dtype, stats = problem.dtype, problem.stats_dtype
    scores, visible = _scores(problem, sequence)
    keep = _keep(problem, sequence)
    kept = 65536 / problem.keep_below
    lse, dout_heads = lse.to(stats)[..., None], dout.to(dtype).transpose(1, 2)
    alive = lse != float("-inf")
    shifted = torch.where(alive, scores.detach().to(stats) - lse.masked_fill(~alive, 0.0), 0.0)
    p = torch.where(visible & alive, shifted.exp(), 0.0).to(dtype)
    v = sequence.v.to(dtype).transpose(1, 2)
    v = v.repeat_interleave(p.shape[1] // max(v.shape[1], 1), 1)
    dp = torch.where(keep, (dout_heads @ v.detach().transpose(2, 3)) * kept, 0.0)
    rows = (out.to(stats) * dout.to(stats)).sum(-1).transpose(1, 2)
    delta = (rows - torch.where(alive[..., 0], dlse.to(stats), 0.0))[..., None]
    ds = p * (dp - delta.to(dtype))
    dv = torch.where(keep, p * kept, 0.0).transpose(2, 3) @ dout_heads
    names = [name for name in leaves if name != "learnable_sink"]
    grads = torch.autograd.grad(
        [scores, v], [leaves[name] for name in names], [ds, dv], allow_unused=True
    )
    result = {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}
    if "learnable_sink" in leaves:
        sink = leaves["learnable_sink"].detach()
        share = torch.where(alive, (sink.to(stats)[None, :, None, None] - lse).exp(), 0.0)
        result["learnable_sink"] = (-share * delta).sum((0, 2, 3)).to(sink.dtype)
    return result


def gather_rows(problem: Problem, pieces: list[Tensor], row_dim: int, fill: float) -> Tensor:
    """Puts the sequences' results together: by batch, or by row when packed, with `fill` at the
    end."""
    if not problem.packed:
        if pieces:
            return torch.cat(pieces)
        batch, q_len, heads = problem.q.shape[:3]
        shape = (
            (batch, q_len, heads, problem.v.shape[-1]) if row_dim == 1 else (batch, heads, q_len)
        )
        return problem.q.new_full(shape, fill, dtype=problem.stats_dtype)
    rows, heads = problem.q.shape[:2]
    rest = rows - sum(piece.shape[row_dim] for piece in pieces)
    shape = (1, rest, heads, problem.v.shape[-1]) if row_dim == 1 else (1, heads, rest)
    dtype = problem.dtype if row_dim == 1 else problem.stats_dtype
    tail = problem.q.new_full(shape, fill, dtype=dtype)
    return torch.cat([*pieces, tail], row_dim)[0]


def _pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[3], 0, rows - x.shape[2]))
