# SPDX-License-Identifier: BSD-3-Clause
"""Differentiation. One backward, `_gradients`, behind three front doors that `attend` chooses from:

    the bare operator    nothing needs a gradient; or torch.compile is tracing (the operator has
                         register_autograd and a vmap rule of its own)
    EagerAttention       plain eager mode: the combined forward(ctx, ...) form, the cheap one
    FunctorchAttention   under vmap, grad, jvp transforms: setup_context and a vmap rule

Forward mode and the derivatives of the gradients are in plain torch, `_higher_order`.
Saved for the backward pass are the inputs, out, lse and the dropout seed: nothing of size seqlen_q
x seqlen_k. Argument orders are those of the operators (csrc/torch/schema.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _higher_order, _ops
from ._ops import call

# Positions of the differentiable inputs among the arguments of the operator `forward`, and their
# number.
_DIFFERENTIABLE = (0, 1, 2, 9, 10, 11)
_NUM_FORWARD, _NUM_BACKWARD = 29, 31


def attend(arguments: tuple) -> tuple[Tensor, Tensor]:
    """The operator `forward`, differentiable. Takes its arguments in its order; returns (out,
    lse)."""
    transformed = torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling():
        mapped = transformed and torch._C._functorch.is_batchedtensor(arguments[0])
        if forward_ad._current_level < 0 and (mapped or not transformed):
            return _ops.forward(*arguments)
        # In a graph the operator would lose tangents unnoticed: what follows is for eager mode.
        torch._dynamo.graph_break("flash_attn: derivatives by torch.func are for eager mode")
    if transformed:
        _refuse_nested_forward_mode()
        return FunctorchAttention.apply(*arguments)
    differentiated = torch.is_grad_enabled() and _wants_gradient(*arguments[:12])
    if differentiated or forward_ad._current_level >= 0:
        q, k, v, cu_q, cu_k, used, leftpad, index, table, bias, slopes, sinks = arguments[:12]
        if differentiated and not (leftpad is None and index is None and table is None):
            _refuse_cache()
        lengths = cu_q, cu_k, used
        return _apply_eager(q, k, v, bias, slopes, sinks, lengths, arguments)
    return call(_ops.forward, *arguments)


def _wants_gradient(
    q, k, v, _cu_q, _cu_k, _used, _leftpad, _index, _table, bias, slopes, sinks
) -> bool:
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (slopes is not None and slopes.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )


def _gradients(run, needs, dout, dlse, q, k, v, out, lse, lengths, bias, slopes, sinks, rest):
    """The backward pass; `run` calls the operator `backward`. Returns gradients or None for each of
    q, k, v, bias, slopes, sinks.

    needs: six bools. lengths: (cu_seqlens_q, cu_seqlens_k, seqused_k). rest: what follows sinks in
    the operator `forward`.
    """
    bits = sum(bool(need) << bit for bit, need in enumerate(needs))
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    *options, family = rest
    grads = run(
        dout, dlse, q, k, v, out, lse, *lengths, bias, slopes, sinks, *options, bits, family
    )
    inputs = (q, k, v, bias, slopes, sinks)
    # The operator accumulates dbias in fp32; the user's bias may be narrower.
    return tuple(
        grad.to(x.dtype) if need else None
        for grad, x, need in zip(grads, inputs, needs, strict=True)
    )


def _call_backward(*arguments):
    return call(_ops.backward, *arguments)


def _refuse_cache():
    raise NotImplementedError(
        "flash_attn: leftpad_k, cache_batch_idx and block_table have no backward; call under "
        "torch.no_grad()"
    )


def _refuse_nested_forward_mode():
    """jvp inside jvp: torch gives wrong tangents through any autograd.Function, in silence."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack) > 1:
        raise NotImplementedError(
            "flash_attn: forward mode inside forward mode (jvp of jvp) is not implemented; "
            'backend="reference" has it, and jvp of grad or grad of jvp works'
        )


_NO_EXTRAS = (None,) * 14


class EagerAttention(torch.autograd.Function):
    """Plain eager mode. `arguments` is the whole call; the inputs before it are there to be
    tracked."""

    @staticmethod
    def forward(ctx, q, k, v, bias, slopes, sinks, lengths, arguments):
        out, lse = call(_ops.forward, *arguments)
        extras = (*lengths, bias, slopes, sinks, *arguments[12:20])
        if extras == _NO_EXTRAS:  # the usual call: each None costs as much as a tensor
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, *extras)
        ctx.options = arguments[20:]
        ctx.arguments = arguments if forward_ad._current_level >= 0 else None
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *extras = ctx.saved_tensors
        cu_q, cu_k, used, bias, slopes, sinks, *lists = extras or _NO_EXTRAS
        # In grad mode somebody may differentiate the gradients: they must not come out as
        # constants.
        run = BackwardOperator.apply if torch.is_grad_enabled() else _call_backward
        grads = _gradients(
            run,
            ctx.needs_input_grad[:6],
            dout,
            dlse,
            q,
            k,
            v,
            out,
            lse,
            (cu_q, cu_k, used),
            bias,
            slopes,
            sinks,
            (*lists, *ctx.options),
        )
        return (*grads, None, None)

    @staticmethod
    def jvp(ctx, *tangents):
        arguments, ctx.arguments = ctx.arguments, None
        primal = (forward_ad.unpack_dual(x)[0] if isinstance(x, Tensor) else x for x in arguments)
        return _higher_order.tangents(tuple(primal), tangents[:6])


# Function.apply below its Python part, which only serves functorch, and costs 2 us of 7.
_apply_eager = super(torch.autograd.Function, EagerAttention).apply


# ---- the registered backward of the operator, shared with FunctorchAttention


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *inputs[9:20], *output)
    ctx.options = inputs[20:]
    ctx.has_backward = all(x is None for x in inputs[6:9])


def _backward(ctx, dout, dlse, run):
    if not ctx.has_backward:
        _refuse_cache()
    q, k, v, cu_q, cu_k, used, bias, slopes, sinks, *lists, out, lse = ctx.saved_tensors
    lengths = cu_q, cu_k, used
    needs = [ctx.needs_input_grad[position] for position in _DIFFERENTIABLE]
    rest = (*lists, *ctx.options)
    grads = _gradients(
        run, needs, dout, dlse, q, k, v, out, lse, lengths, bias, slopes, sinks, rest
    )
    result = [None] * _NUM_FORWARD
    for position, grad in zip(_DIFFERENTIABLE, grads, strict=True):
        result[position] = grad
    return tuple(result)


class FunctorchAttention(torch.autograd.Function):
    """Under torch.func transforms and torch.vmap."""

    @staticmethod
    def forward(*arguments):
        return call(_ops.forward, *arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:20])

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward(ctx, dout, dlse, BackwardOperator.apply)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap_forward(FunctorchAttention.apply, info.batch_size, in_dims, arguments)

    @staticmethod
    def jvp(ctx, *tangents):
        dots = tuple(tangents[position] for position in _DIFFERENTIABLE)
        return _higher_order.tangents((*ctx.saved_tensors, *ctx.options), dots)


class BackwardOperator(torch.autograd.Function):
    """The operator `backward` where its results may be transformed or differentiated again."""

    @staticmethod
    def forward(*arguments):
        return call(_ops.backward, *arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _setup_backward(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:_BACKWARD_TENSORS])

    @staticmethod
    def backward(ctx, *grads):
        return _double_backward(ctx, *grads)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap_backward(BackwardOperator.apply, info.batch_size, in_dims, arguments)

    @staticmethod
    def jvp(ctx, ddout, ddlse, dq, dk, dv, _out, _lse, _cu_q, _cu_k, _used, *tangents):
        (dout, dlse, lse), arguments = _forward_arguments(ctx)
        dots = dq, dk, dv, *tangents[:3]
        found = _higher_order.gradient_tangents(arguments, dout, dlse, lse, dots, ddout, ddlse)
        kinds = *arguments[:3], lse, lse, lse  # what the operator returns gradients in
        return tuple(
            x.to(kind.dtype) if ctx.needs >> bit & 1 else kind.new_zeros(0)
            for bit, (x, kind) in enumerate(zip(found, kinds, strict=True))
        )


# ---- the backward of the operator `backward`

_BACKWARD_TENSORS = 21  # of its arguments: all up to philox


def _setup_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_BACKWARD_TENSORS])
    *ctx.options, ctx.needs, ctx.family = inputs[_BACKWARD_TENSORS:]
    ctx.set_materialize_grads(False)


def _forward_arguments(ctx) -> tuple[tuple, tuple]:
    """(dout, dlse, lse), and the arguments of the operator `forward`, from a backward's context."""
    dout, dlse, q, k, v, _out, lse, *rest = ctx.saved_tensors
    tensors = q, k, v, *rest[:3], None, None, None, *rest[3:]
    return (dout, dlse, lse), (*tensors, *ctx.options, ctx.family)


def _double_backward(ctx, *grads):
    """Gradients of what `backward` was given. out and lse count as functions of q, k, v, …, so
    what reaches them is in the gradients of those."""
    (dout, dlse, lse), arguments = _forward_arguments(ctx)
    wanted = [g if ctx.needs >> bit & 1 else None for bit, g in enumerate(grads)]
    found = _higher_order.second_gradients(arguments, dout, dlse, lse, wanted)
    ddout, ddlse, *inputs = found
    inputs = [
        None if g is None else g.to(x.dtype)
        for g, x in zip(inputs, (*arguments[:3], *arguments[9:12]), strict=True)
    ]
    result = [None] * _NUM_BACKWARD
    result[0], result[1] = ddout.to(dout.dtype), ddlse
    result[2:5], result[10:13] = inputs[:3], inputs[3:]
    return tuple(result)


def _register() -> None:
    """Autograd and vmap rules of the operators themselves: for compile, export and direct
    callers."""
    torch.library.register_autograd(
        "flash_attn::forward",
        lambda ctx, dout, dlse: _backward(ctx, dout, dlse, _ops.backward),
        setup_context=_setup_context,
    )
    torch.library.register_autograd(
        "flash_attn::backward",
        _double_backward,
        setup_context=_setup_backward,
    )
    for name in ("delta", "rotary"):
        torch.library.register_autograd(
            f"flash_attn::{name}",
            lambda ctx, *grads, name=name: _no_gradient(name),
            setup_context=lambda ctx, inputs, output: None,
        )
    torch.library.register_vmap(
        "flash_attn::forward",
        lambda info, in_dims, *arguments: _vmap_forward(
            _ops.forward, info.batch_size, in_dims, arguments
        ),
    )
    torch.library.register_vmap(
        "flash_attn::backward",
        lambda info, in_dims, *arguments: _vmap_backward(
            _ops.backward, info.batch_size, in_dims, arguments
        ),
    )
    torch.library.register_vmap(
        "flash_attn::rotary",
        lambda info, in_dims, *arguments: _vmap_rotary(info.batch_size, in_dims, arguments),
    )


def _no_gradient(name):
    raise NotImplementedError(f"flash_attn: the operator `{name}` has no backward")


# ---- vmap: the mapped dimension becomes part of the batch where that means the same


def _vmap_forward(apply, size: int, in_dims, arguments):
    if size == 0:
        return _vmap_none(_vmap_forward, apply, in_dims, arguments)
    lengths, bias, slopes, _sinks, *rest = arguments[3:9], *arguments[9:20]
    if not _foldable(lengths, bias, slopes, rest, in_dims[9:20]):
        return _vmap_loop(apply, size, in_dims, arguments)
    folded = (_fold(x, dim, size) for x, dim in zip(arguments[:3], in_dims[:3], strict=True))
    return tuple(_unfold(x, size) for x in apply(*folded, *arguments[3:])), (0, 0)


def _vmap_backward(apply, size: int, in_dims, arguments):
    if size == 0:
        return _vmap_none(_vmap_backward, apply, in_dims, arguments)
    needs = arguments[-2]
    lengths, bias, slopes, _sinks, *rest = arguments[7:10], *arguments[10:21]
    # Gradients of what the batch entries share would have to be kept apart: the loop does that.
    if needs & ~7 or not _foldable(lengths, bias, slopes, rest, in_dims[10:21]):
        return _vmap_loop(apply, size, in_dims, arguments)
    folded = (_fold(x, dim, size) for x, dim in zip(arguments[:7], in_dims[:7], strict=True))
    grads = apply(*folded, *arguments[7:])
    wanted = [bool(needs >> bit & 1) for bit in range(6)]
    return tuple(
        _unfold(grad, size) if want else grad for grad, want in zip(grads, wanted, strict=True)
    ), tuple(0 if want else None for want in wanted)


def _vmap_rotary(size: int, in_dims, arguments):
    """The operator `rotary`: x, cos, sin, offsets (one for each batch entry), and two bools."""
    x, cos, sin, offsets, *rest = arguments
    if size == 0:
        shape = x.shape if in_dims[0] is None else x.movedim(in_dims[0], 0).shape[1:]
        return x.new_empty((0, *shape)), 0
    if in_dims[1] is not None or in_dims[2] is not None:
        (out,), (dim,) = _vmap_loop(lambda *x: (_ops.rotary(*x),), size, in_dims, arguments)
        return out, dim
    x, offsets = _fold(x, in_dims[0], size), _fold(offsets, in_dims[3], size)
    return _unfold(_ops.rotary(x, cos, sin, offsets, *rest), size), 0


def _foldable(lengths, bias, slopes, rest, in_dims) -> bool:
    """Dense, without dropout, and nothing but q, k, v (and what belongs to them) depends on the
    batch.

    rest: the lists of a block mask, its bits, philox. in_dims: of bias and all after it.
    """
    *lists, _bits, philox = rest
    return (
        all(x is None for x in (*lengths, philox))
        and all(dim is None for dim in in_dims)
        and all(x is None or x.shape[0] == 1 for x in (bias, *lists))
        and (slopes is None or slopes.dim() == 1)
    )


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, x.shape[0] // size))


def _vmap_none(rule, apply, in_dims, arguments):
    """A mapped dimension of size 0: one entry of zeros gives the shapes, and is cut off again."""

    def lengthened(x: Tensor, dim: int) -> Tensor:
        zeros = x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
        return torch.cat([x, zeros], dim)

    padded = tuple(
        x if dim is None else lengthened(x, dim) for x, dim in zip(arguments, in_dims, strict=True)
    )
    outputs, out_dims = rule(apply, 1, in_dims, padded)
    return tuple(
        x if dim is None else x.narrow(dim, 0, 0) for x, dim in zip(outputs, out_dims, strict=True)
    ), out_dims


def _vmap_loop(apply, size: int, in_dims, arguments):
    """One call for each entry of the mapped dimension."""
    calls = [
        apply(
            *(
                x if dim is None else x.select(dim, i)
                for x, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)


_register()
