# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of one point, and whether a result is right: every implementation is checked on the very
tensors that are timed, against plain attention of the last batch's last key head.
"""

from dataclasses import dataclass, field

import torch
from shapes import BLOCK, Shape, visible_blocks
from torch import Tensor

ROWS = 2048  # query rows of the reference at a time
# Relative to the whole tensor; a single row may be off by ROW_FACTOR times that, since the first
# rows of causal gradients are differences of nearly equal numbers.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-9}
ROW_FACTOR = 10.0
# Expected share of the plain call's speed: forward, backward.
FEATURES = {
    "plain": (1.0, 1.0),
    "bias": (0.6, 0.5),
    "bias_grad": (0.6, 0.35),
    "mask": (0.6, 0.5),
    "dropout": (0.6, 0.5),
    "softcap": (0.6, 0.5),
    "alibi": (0.6, 0.5),
    "sinks": (0.6, 0.5),
}


@dataclass
class Problem:
    """q, k, v and dout, (batch, seqlen, heads, head_dim), random normal; and a feature's extras."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    feature: str = "plain"
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    dout: Tensor = field(init=False)
    extra: dict[str, object] = field(init=False)  # keyword arguments of flash_attn_func
    blocks: Tensor | None = field(init=False)  # (rows, columns) bool

    def __post_init__(self) -> None:
        shape = self.shape
        torch.manual_seed(0)
        self.q = self.random(shape.batch, shape.seqlen, shape.heads, shape.head_dim)
        self.k = self.random(shape.batch, shape.keys, shape.key_heads, shape.head_dim)
        self.v = self.random(shape.batch, shape.keys, shape.key_heads, shape.head_dim)
        self.dout = self.random(shape.batch, shape.seqlen, shape.heads, shape.head_dim)
        blocks = visible_blocks(shape)
        self.blocks = None if blocks is None else blocks.to(self.device)
        self.extra = self.extras()

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self.dtype, device=self.device)

    def extras(self) -> dict[str, object]:
        shape, name = self.shape, self.feature
        scores = (1, shape.heads, shape.seqlen, shape.keys)
        if name in ("bias", "bias_grad"):
            return {"attn_bias": self.random(*scores)}
        if name == "mask":
            return {"attn_bias": torch.rand(1, 1, *scores[2:], device=self.device) < 0.9}
        if name == "softcap":
            return {"softcap": 30.0}
        if name == "alibi":
            powers = torch.arange(1, shape.heads + 1, device=self.device)
            return {"alibi_slopes": torch.exp2(-8.0 * powers / shape.heads)}
        if name == "sinks":
            return {"learnable_sink": self.random(shape.heads)}
        return {}

    @property
    def dropout(self) -> float:
        return 0.1 if self.feature == "dropout" else self.shape.dropout

    def with_gradient(self) -> list[Tensor]:
        """Extras whose gradient is wanted."""
        return [self.extra["attn_bias"]] if self.feature == "bias_grad" else []


def scores_of(problem: Problem, head: int, q: Tensor, k: Tensor, row: int) -> Tensor:
    """(rows, keys) scores of a head's queries from `row` on, with all that the problem adds.

    A sink is one more column, at the end.
    """
    shape, extra = problem.shape, problem.extra
    scores = (q @ k.T) * shape.head_dim**-0.5
    i = torch.arange(row, row + len(q), device=q.device)[:, None] + shape.keys - shape.seqlen
    j = torch.arange(shape.keys, device=q.device)
    if "softcap" in extra:
        scores = extra["softcap"] * torch.tanh(scores / extra["softcap"])
    if "alibi_slopes" in extra:
        scores = scores - extra["alibi_slopes"][head] * (i - j).abs()
    bias = extra.get("attn_bias")
    if bias is not None:
        bias = bias[-1, min(head, bias.shape[1] - 1), row : row + len(q)]
        hidden = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else None
        scores = scores + bias if hidden is None else hidden
    if shape.causal:
        scores = scores.masked_fill(j > i, -torch.inf)
    if problem.blocks is not None:
        visible = problem.blocks[torch.arange(row, row + len(q), device=q.device) // BLOCK]
        visible = visible.repeat_interleave(BLOCK, 1)[:, : shape.keys]
        scores = scores.masked_fill(~visible, -torch.inf)
    if "learnable_sink" in extra:
        sink = extra["learnable_sink"][head].to(scores.dtype).expand(len(q), 1)
        scores = torch.cat([scores, sink], 1)
    return scores


def reference(problem: Problem, op: str) -> list[Tensor]:
    """The results of `op` for the last batch and key head, without dropout, in fp32 (fp64 if fp32).

    Returns:
        out (seqlen, group, head_dim) unless op is bwd; dq like out, dk and dv (keys, head_dim)
        for bwd and fwd_bwd. One row of keys must be visible from every query.
    """
    shape = problem.shape
    group = shape.heads // shape.key_heads
    wide = torch.float32 if problem.dtype in (torch.bfloat16, torch.float16) else torch.float64
    k, v = (x.detach()[-1, :, -1].to(wide) for x in (problem.k, problem.v))
    if op in ("bwd", "fwd_bwd"):
        k, v = k.requires_grad_(), v.requires_grad_()
    out, dq, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for head in range(shape.heads - group, shape.heads):
        outs, dqs = [], []
        for row in range(0, shape.seqlen, ROWS):
            rows = slice(row, row + ROWS)
            q = problem.q[-1, rows, head].to(wide).requires_grad_(k.requires_grad)
            p = scores_of(problem, head, q, k, row).softmax(1)[:, : shape.keys]
            outs.append(p @ v)
            if k.requires_grad:
                dout = problem.dout[-1, rows, head].to(wide)
                parts = torch.autograd.grad(outs[-1], (q, k, v), dout)
                dqs.append(parts[0])
                dk += parts[1]
                dv += parts[2]
        out.append(torch.cat(outs).detach())
        dq += [torch.cat(dqs)] if dqs else []
    results = [] if op == "bwd" else [torch.stack(out, 1)]
    return [*results, torch.stack(dq, 1), dk, dv] if k.requires_grad else results


def checked_part(shape: Shape, result: Tensor, of_keys: bool) -> Tensor:
    """What `reference` computes, of one result: out, dq (of_keys False), dk or dv (True)."""
    group = shape.heads // shape.key_heads
    return result[-1, :, -1] if of_keys else result[-1, :, shape.heads - group :]


def error_of(result: Tensor, expected: Tensor) -> tuple[float, float]:
    """Relative error of the whole and of the worst row; rows are measured against the larger of
    their own and the typical row's length. NaN stays NaN.
    """
    expected = expected.double().reshape(-1, expected.shape[-1])
    error = result.double().reshape(expected.shape) - expected
    typical = expected.norm() / max(1, len(expected)) ** 0.5
    whole = (error.norm() / expected.norm().clamp_min(1e-30)).item()
    scale = torch.maximum(expected.norm(dim=1), typical).clamp_min(1e-30)
    return whole, (error.norm(dim=1) / scale).max().item()


def check(problem: Problem, results: list[Tensor], expected: list[Tensor]) -> tuple[float, str]:
    """(largest relative error, '' or what is wrong) of [out], [dq, dk, dv] or all four.

    With dropout, the results must lie along the expected ones, as their mean over masks does.
    """
    worst = 0.0
    for i, (result, right) in enumerate(zip(results, expected, strict=False)):
        part = checked_part(problem.shape, result, len(expected) - i <= 2 < len(expected))
        if problem.dropout:
            a, b = part.double().flatten(), right.double().flatten()
            whole, limit = abs((a @ b / (b @ b)).item() - 1), 0.05
            row, row_limit = whole, limit
        else:
            whole, row = error_of(part, right)
            limit = TOLERANCE[problem.dtype]
            row_limit = limit * ROW_FACTOR
        if not (whole <= limit and row <= row_limit):
            return whole, f"wrong: result {i} is off by {whole:.1e}, its worst row by {row:.1e}"
        worst = max(worst, whole)
    return worst, ""
