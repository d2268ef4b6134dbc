# SPDX-License-Identifier: BSD-3-Clause
"""Attention written out twice in plain torch, from the specification alone: what the tests
compare with.

`attend` is differentiable and works in whatever dtype its inputs have: fp64 gives the truth, the
tested dtype gives the error that plain torch makes. `attend_written_out` has the gradient written
out from the rounded out and lse, as every recomputing kernel has to do it. Neither shares a line
with the library, `flash_attn.reference` included, so that two readings of the specification are
compared.
"""

import math
from dataclasses import dataclass

import torch

NEG_INF = float("-inf")


@dataclass
class Rule:
    """What one call asks for beside the tensors that can have a gradient."""

    scale: float
    window: tuple[int, int] = (-1, -1)  # causal is (…, 0)
    softcap: float = 0.0
    blocks: torch.Tensor | None = None  # (batch | 1, heads | 1, rows, columns) bool
    block_size: tuple[int, int] = (1, 1)
    keep: torch.Tensor | None = None  # (batch, heads, seqlen_q, seqlen_k) bool: survives dropout
    dropout_p: float = 0.0


def visible(rule: Rule, seqlen_q: int, seqlen_k: int, device) -> torch.Tensor:
    """Bool, broadcastable to (batch, heads, seqlen_q, seqlen_k): window and block mask."""
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)[None, :]
    left, right = rule.window
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    seen = seen[None, None]
    if rule.blocks is not None:
        wide = rule.blocks.repeat_interleave(rule.block_size[0], 2)
        wide = wide.repeat_interleave(rule.block_size[1], 3)
        seen = seen & wide[:, :, :seqlen_q, :seqlen_k]
    return seen


def realised_scale(dropout_p: float) -> float:
    """Dropout keeps round((1 - p) * 65536) lanes of 65536, and scales by that rate."""
    return 65536.0 / round((1.0 - dropout_p) * 65536)


def scores(rule: Rule, q, k, bias, slopes):
    """(s, hidden): scores of (batch, heads, seqlen_q, seqlen_k) before softmax, -inf where
    hidden."""
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * rule.scale
    if rule.softcap > 0:
        s = rule.softcap * torch.tanh(s / rule.softcap)
    seqlen_q, seqlen_k = s.shape[2:]
    if slopes is not None:
        s = s - slopes.to(s.dtype).reshape(-1, s.shape[1], 1, 1) * distance(s).to(s.dtype)
    seen = visible(rule, seqlen_q, seqlen_k, s.device)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    elif bias is not None:
        s = s + bias.to(s.dtype)
    return s.masked_fill(~seen, NEG_INF)


def distance(s):
    """|i + seqlen_k - seqlen_q - j| of ALiBi."""
    i = torch.arange(s.shape[2], device=s.device)[:, None] + s.shape[3] - s.shape[2]
    return (i - torch.arange(s.shape[3], device=s.device)[None, :]).abs()


def attend(rule: Rule, q, k, v, bias=None, slopes=None, sinks=None):
    """(out, lse) of dense inputs: out and the arithmetic in their dtype, lse at least fp32. A row
    without keys gives 0 and -inf (or the sink)."""
    s = scores(rule, q, k, bias, slopes)
    statistics = torch.float64 if s.dtype == torch.float64 else torch.float32
    if sinks is not None:
        sink = sinks.to(s.dtype).reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
        s = torch.cat([s, sink], 3)
    live = (s > NEG_INF).any(3, keepdim=True)
    s = torch.where(live, s, torch.zeros_like(s))
    if s.shape[3]:
        p = torch.softmax(s, 3) * live
        lse = torch.logsumexp(s.to(statistics), 3, keepdim=True)
        lse = torch.where(live, lse, NEG_INF)[..., 0]
    else:
        p, lse = s, s.new_full(s.shape[:3], NEG_INF, dtype=statistics)
    if sinks is not None:
        p = p[..., :-1]
    if rule.keep is not None:
        p = p * rule.keep * realised_scale(rule.dropout_p)
    group = q.shape[2] // v.shape[2] if v.shape[2] else 1
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2)), lse


class WrittenOut(torch.autograd.Function):
    """`attend` with the gradient as a recomputing kernel writes it: from the rounded out and
    fp32 lse, products in the inputs' dtype, sums in fp32."""

    @staticmethod
    def forward(ctx, rule, q, k, v, bias, slopes, sinks):
        inputs = (q, k, v, bias, slopes, sinks)
        wide = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
        exact_out, exact_lse = attend(rule, *wide)
        ctx.rule = rule
        ctx.save_for_backward(*inputs, exact_out.to(q.dtype), exact_lse.float())
        return attend(rule, *inputs)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, bias, slopes, sinks, out, lse = ctx.saved_tensors
        rule, low, group = ctx.rule, q.dtype, q.shape[2] // k.shape[2]
        wide_k, wide_v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        s = scores(rule, q, k, bias, slopes).float()
        live = lse > NEG_INF
        safe = torch.where(live, lse, torch.zeros_like(lse))
        p = torch.exp(s - safe[..., None]).to(low)
        drop = 1.0 if rule.keep is None else rule.keep * realised_scale(rule.dropout_p)
        # Not rounded: that would hide what the rounding of out costs delta, one number a row.
        dp = torch.einsum("bihd,bjhd->bhij", dout.float(), wide_v.float()) * drop
        delta = (out.float() * dout.float()).sum(3).transpose(1, 2) - dlse.float()
        ds = (p.float() * (dp - delta[..., None])).to(low)
        dv = torch.einsum("bhij,bihd->bjhd", (p * drop).to(low), dout)

        dbias = dslopes = dsinks = None
        if bias is not None and bias.dtype != torch.bool:
            dbias = ds.float().sum_to_size(bias.shape).to(bias.dtype)
        if slopes is not None:
            by_head = -(ds.float() * distance(s)).sum((2, 3))
            dslopes = by_head.sum_to_size(slopes.shape).to(slopes.dtype)
        if sinks is not None:
            share = torch.exp(sinks.float()[None, :, None] - safe) * live
            dsinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        if rule.softcap > 0:
            raw = torch.einsum("bihd,bjhd->bhij", q, wide_k) * rule.scale
            ds = ds * (1 - torch.tanh(raw / rule.softcap) ** 2)
        dq = torch.einsum("bhij,bjhd->bihd", ds, wide_k) * rule.scale
        dk = torch.einsum("bhij,bihd->bjhd", ds, q) * rule.scale
        return None, dq, fold(dk, group), fold(dv, group), dbias, dslopes, dsinks


def attend_written_out(rule, q, k, v, bias=None, slopes=None, sinks=None):
    return WrittenOut.apply(rule, q, k, v, bias, slopes, sinks)


def fold(x, group):
    """Sums the query heads that share a key head: (batch, seqlen, heads, dim) -> (…, heads //
    group, dim)."""
    return x.unflatten(2, (x.shape[2] // group, group)).float().sum(3).to(x.dtype)


def philox_keep(
    seed: int, offset: int, batch: int, heads: int, seqlen_q: int, seqlen_k: int, p: float
):
    """The dropout decisions, written out from design decision 9: (batch, heads, seqlen_q,
    seqlen_k) bool."""
    below = round((1.0 - p) * 65536)
    keep = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                for j in range(seqlen_k):
                    counter = (i // 16 * 8 + i % 8, j // 32 * 8 + j % 8, b * heads + h, offset)
                    words = philox(seed, counter)
                    lane = 4 * (i % 16 // 8) + j % 32 // 8
                    keep[b, h, i, j] = (words[lane // 2] >> (16 * (lane % 2))) & 0xFFFF < below
    return keep


def philox(seed: int, counter, rounds: int = 7):
    """Philox4x32: four 32-bit words from a 64-bit key and a 128-bit counter (Salmon et al.,
    2011)."""
    mask = 0xFFFFFFFF
    c = [x & mask for x in counter]
    key = [seed & mask, (seed >> 32) & mask]
    for _ in range(rounds):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)
