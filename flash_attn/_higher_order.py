# SPDX-License-Identifier: BSD-3-Clause
"""Derivatives that no kernel computes: forward mode, and derivatives of the gradients.

In plain torch, by the reference, a few hundred query rows at a time: what is held at once is of
size rows x seqlen_k, so memory stays linear in the lengths; time is that of plain torch. With f the
attention of some rows and g its gradients, both linear in what comes in from outside,

    tangents             f's derivative applied to tangents of its inputs
    gradient_tangents    g's
    second_gradients     the transpose of g's derivative: what double backward asks for

A derivative is applied forwards by transposing its transpose, since torch cannot nest its forward
mode. Ragged batches read their lengths on the host: on a GPU that synchronises.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import reference
from .masks import BlockMask

_ROWS = 256
# The differentiable inputs, in the operators' order, by the reference's names.
_NAMES = ("q", "k", "v", "attn_bias", "alibi_slopes", "learnable_sink")


class _Call:
    """One call of the operator `forward`, ready to be evaluated piece by piece."""

    def __init__(self, arguments: tuple):
        lists, block_size = arguments[12:19], arguments[25:27]
        mask = None if lists[0] is None else BlockMask(block_size, *lists)
        self.keywords = reference.from_operator(arguments, mask)
        given = {name: self.keywords[name] for name in _NAMES}
        self.leaves = {
            name: _wide(x) for name, x in given.items() if x is not None and x.is_floating_point()
        }
        for name in self.leaves:
            del self.keywords[name]
        self.problem = reference.make_problem(**self.keywords, **self.leaves)
        self.places = [place for _, place in _pieces(self.problem)]

    def evaluate(self, number: int, leaves: dict) -> tuple[Tensor, Tensor]:
        """out (batch, rows, heads, head_dim_v) and lse (batch, heads, rows) of one piece."""
        problem = reference.make_problem(**self.keywords, **leaves)
        piece, _ = next(islice(_pieces(problem), number, None))
        return reference.attend_sequence(problem, piece)

    def gradients(self, number: int, inputs: dict) -> dict:
        """What one piece gives to the gradients. `inputs`: the leaves, and dout and dlse, whole."""
        leaves = {name: inputs[name] for name in self.leaves}
        batch, rows = self.places[number]
        dout, dlse = inputs["dout"], inputs["dlse"]
        if self.problem.packed:
            incoming = dout[None, rows], dlse[None, :, rows]
        else:
            incoming = dout[batch, rows], dlse[batch, :, rows]
        return torch.func.vjp(partial(self.evaluate, number), leaves)[1](incoming)[0]

    def backward_inputs(self, dout: Tensor, dlse: Tensor | None, lse: Tensor) -> dict:
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        return {**self.leaves, "dout": _wide(dout), "dlse": dlse}


def _wide(x: Tensor) -> Tensor:
    """In the dtype of the arithmetic, so that sums over pieces are not rounded."""
    return x if x.dtype == torch.float64 else x.float()


def _pieces(problem):
    """Each piece, and where its rows stand in out: (which batch entries, which rows)."""
    begin = 0
    for sequence in reference.sequences(problem):
        length = sequence.q.shape[1]
        for first in range(0, length, _ROWS):
            last = min(first + _ROWS, length)
            piece = sequence._replace(q=sequence.q[:, first:last], q_first=first)
            yield piece, (sequence.batch, slice(begin + first, begin + last))
        begin += length if problem.packed else 0


def _apply_derivative(f, inputs: dict, tangents: dict):
    """The derivative of f at inputs, applied to tangents."""

    def transposed(incoming):
        return torch.func.vjp(f, inputs)[1](incoming)[0]

    zeros = tree_map(torch.zeros_like, f(inputs))
    return torch.func.vjp(transposed, zeros)[1](tangents)[0]


def _completed(like: dict, given: dict) -> dict:
    """`given` in the shape of `like`, zeros for what is missing."""
    return {
        name: torch.zeros_like(x) if given.get(name) is None else given[name].to(x.dtype)
        for name, x in like.items()
    }


def tangents(arguments: tuple, dots: tuple) -> tuple[Tensor, Tensor]:
    """Tangents of out and lse. dots: six tangents or None, of q, k, v, bias, slopes, sinks."""
    call = _Call(arguments)
    dots = _completed(call.leaves, dict(zip(_NAMES, dots, strict=True)))
    outs, lses = [], []  # a list of pieces for each sequence
    for number, (_, rows) in enumerate(call.places):
        out, lse = _apply_derivative(partial(call.evaluate, number), call.leaves, dots)
        if rows.start == 0 or not outs:
            outs.append([])
            lses.append([])
        outs[-1].append(out)
        lses[-1].append(lse)
    out, lse = (
        reference.gather_rows(call.problem, [torch.cat(x, dim) for x in pieces], dim, 0.0)
        for pieces, dim in ((outs, 1), (lses, 2))
    )
    return out.to(arguments[0].dtype), lse


def _sum(f, count: int, like: dict) -> dict:
    total = {name: torch.zeros_like(x) for name, x in like.items()}
    for number in range(count):
        part = f(number)
        total = {name: total[name] + part[name] for name in total}
    return total


def gradient_tangents(arguments: tuple, dout, dlse, lse, dots: tuple, ddout, ddlse) -> tuple:
    """Tangents of the gradients of q, k, v, bias, slopes, sinks; None for what is not there.

    dots: tangents of those six. ddout, ddlse: of dout and dlse. Each may be None.
    """
    call = _Call(arguments)
    inputs = call.backward_inputs(dout, dlse, lse)
    given = {**dict(zip(_NAMES, dots, strict=True)), "dout": ddout, "dlse": ddlse}
    given = _completed(inputs, given)
    total = _sum(
        lambda number: _apply_derivative(partial(call.gradients, number), inputs, given),
        len(call.places),
        call.leaves,
    )
    return tuple(total.get(name) for name in _NAMES)


def second_gradients(arguments: tuple, dout, dlse, lse, grads: tuple) -> tuple:
    """Gradients of dout and dlse, then of q, k, v, bias, slopes, sinks; None for what is not there.

    grads: the gradients that come in for the six first ones; None for those that nothing uses.
    """
    call = _Call(arguments)
    inputs = call.backward_inputs(dout, dlse, lse)
    incoming = _completed(call.leaves, dict(zip(_NAMES, grads, strict=True)))
    total = _sum(
        lambda number: torch.func.vjp(partial(call.gradients, number), inputs)[1](incoming)[0],
        len(call.places),
        inputs,
    )
    ddlse = None if dlse is None else total["dlse"]
    return total["dout"], ddlse, *(total.get(name) for name in _NAMES)
