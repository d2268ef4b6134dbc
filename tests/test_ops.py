# SPDX-License-Identifier: BSD-3-Clause
"""The registered operators themselves: every one is called, opcheck, compile, export."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import flash_attn
from flash_attn import _ops

OPS = torch.ops.flash_attn
NONE = (None,)


def forward_args(device, dtype=torch.float32, grad=False, packed=False, features=False, p=0.0):
    """Arguments of flash_attn::forward in its schema's order."""
    shape = (7,) if packed else (2, 5)
    q = torch.randn(*shape, 4, 16, device=device, dtype=dtype, requires_grad=grad)
    k = torch.randn(*shape, 2, 16, device=device, dtype=dtype, requires_grad=grad)
    v = torch.randn(*shape, 2, 8, device=device, dtype=dtype, requires_grad=grad)
    cu = torch.tensor([0, 2, 7], dtype=torch.int32, device=device) if packed else None
    bias = slopes = sinks = None
    blocks = NONE * 7
    sizes = (0, 0)
    if features:
        sizes = (2, 4)
        bias = torch.randn(1, 4, 5, 5, device=device, dtype=dtype, requires_grad=grad)
        slopes = torch.rand(4, device=device, requires_grad=grad)
        sinks = torch.randn(4, device=device, requires_grad=grad)
        mask = flash_attn.BlockMask.from_predicate(
            lambda b, h, q, k: (q + k) % 4 < 3, None, None, 5, 5, sizes, device
        )
        blocks = mask.lists
    philox = torch.tensor([3, 5], device=device) if p else None
    tensors = (q, k, v, cu, cu, None, None, None, None, bias, slopes, sinks, *blocks, philox)
    return (*tensors, 0.25, 0.0, p, -1, 0, *sizes, False, 0)


def backward_args(device, needs=7, **kind):
    """Arguments of flash_attn::backward, made by a forward call."""
    args = forward_args(device, **kind)
    out, lse = OPS.forward(*args)
    q, k, v, cu_q, cu_k, used, _, _, _, bias, slopes, sinks = args[:12]
    *options, _, family = args[20:]
    tensors = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, cu_q, cu_k, used)
    tensors += (bias, slopes, sinks, *args[12:20])
    return (*tensors, *options, True, needs, family)


def append_args(device):
    cache = torch.zeros(2, 8, 2, 16, device=device)
    new = torch.randn(2, 1, 2, 16, device=device)
    lengths = torch.tensor([3, 0], dtype=torch.int32, device=device)
    tables = torch.rand(8, 4, device=device)
    return (
        cache,
        cache.clone(),
        new,
        new.clone(),
        tables,
        tables.clone(),
        lengths,
        None,
        None,
        True,
    )


def rotary_args(device):
    x, tables = torch.randn(2, 3, 4, 16, device=device), torch.rand(9, 4, device=device)
    return (
        x,
        tables,
        tables.clone(),
        torch.tensor([1, 5], dtype=torch.int32, device=device),
        True,
        True,
    )


def delta_args(device, packed=False):
    shape = (7, 4, 16) if packed else (2, 5, 4, 16)
    return torch.randn(shape, device=device), torch.randn(shape, device=device)


CALLS = {
    "forward": lambda device: (OPS.forward, forward_args(device)),
    "backward": lambda device: (OPS.backward, backward_args(device)),
    "delta": lambda device: (OPS.delta, delta_args(device)),
    "append_kv": lambda device: (OPS.append_kv, append_args(device)),
    "rotary": lambda device: (OPS.rotary, rotary_args(device)),
}


def test_ops_all_are_known():
    """The table above is the schema's list."""
    registered = {
        s.name.split("::")[1]
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith("flash_attn::")
    }
    assert registered == set(CALLS) == set(_ops.OPERATORS)
    assert _ops.missing_kernels("CPU") == []


@pytest.mark.parametrize("name", CALLS)
def test_ops_presence(name, device):
    """Every operator is called once: a kernel that disagrees with its schema shows only then."""
    op, args = CALLS[name](device)
    with torch.no_grad():
        op(*args)


KINDS = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "packed": {"packed": True},
    "features": {"features": True},
    "dropout": {"p": 0.3},
    "packed-features-dropout": {"packed": True, "features": True, "p": 0.3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [False, True])
def test_ops_opcheck_forward(kind, grad, device):
    opcheck(OPS.forward.default, forward_args(device, grad=grad, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_ops_opcheck_backward(kind, device):
    with torch.no_grad():
        features = KINDS[kind].get("features")
        opcheck(
            OPS.backward.default, backward_args(device, needs=63 if features else 7, **KINDS[kind])
        )


@pytest.mark.parametrize("needs", [1, 2, 4, 8, 16, 32])
def test_ops_backward_needs(needs, device):
    """What is not asked for comes back with no elements; opcheck on each."""
    args = backward_args(device, needs=needs, features=True)
    names = [grad.numel() > 0 for grad in OPS.backward(*args)]
    assert names == [bool(needs >> bit & 1) for bit in range(6)]
    opcheck(OPS.backward.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("packed", [False, True])
def test_ops_delta(packed, device):
    out, dout = delta_args(device, packed)
    opcheck(OPS.delta.default, (out, dout))
    expected = (out * dout).sum(-1).transpose(-1, -2)
    torch.testing.assert_close(OPS.delta(out, dout), expected)


def test_ops_opcheck_cache_operators(device):
    opcheck(OPS.append_kv.default, append_args(device))
    opcheck(OPS.rotary.default, rotary_args(device))


def test_bc61_append_is_declared_as_mutating():
    schema = OPS.append_kv.default._schema
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    assert written == ["k_cache", "v_cache"]


@pytest.mark.parametrize("length", [128, 196, 256, 257])
@pytest.mark.parametrize("swap", [False, True])
def test_bc63_fake_matches_real(length, swap, device):
    """Shape, stride, dtype and device of every result under fake tensors, for permuted inputs
    too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run(q, k, v):
        out, lse = flash_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        return out, lse, *grads

    inputs = [torch.randn(1, length, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(3)]
    if swap:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    real = run(*inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = run(*(mode.from_tensor(x) for x in inputs))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def dense(q, k, v, bias, sinks):
    return flash_attn.flash_attn_func(
        q, k, v, causal=True, window_size=(9, -1), softcap=3.0, attn_bias=bias, learnable_sink=sinks
    )


def compiled_inputs(device, length=24):
    q = torch.randn(2, length, 4, 16, device=device, requires_grad=True)
    k, v = (torch.randn(2, length, 2, 16, device=device, requires_grad=True) for _ in "kv")
    bias = torch.randn(1, 4, length, length, device=device, requires_grad=True)
    return q, k, v, bias, torch.randn(4, device=device, requires_grad=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend, device):
    """One graph forward and backward, values and gradients as in eager mode."""
    torch.compiler.reset()
    inputs = compiled_inputs(device)
    expected = dense(*inputs)
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    found = torch.compile(dense, fullgraph=True, backend=backend)(*inputs)
    torch.testing.assert_close(found, expected)
    compiled_grads = torch.autograd.grad(found.square().sum(), inputs)
    for a, b in zip(compiled_grads, grads, strict=True):
        torch.testing.assert_close(a, b)


def test_compile_dynamic_does_not_recompile(device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(dense, fullgraph=True, dynamic=True, backend=counter)
    compiled = []  # graphs after each call; the first makes one or, since torch 2.15, two
    for length in (24, 40, 33):
        inputs = compiled_inputs(device, length)
        torch.testing.assert_close(run(*inputs), dense(*inputs))
        compiled.append(counter.frame_count)
    assert len(set(compiled)) == 1


def test_compile_varlen_and_dropout(device):
    torch.compiler.reset()
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    q = torch.randn(12, 2, 16, device=device, requires_grad=True)

    def run(q, cu, longest):
        return flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, causal=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for longest in (7, torch.tensor(7), None):
        torch.testing.assert_close(compiled(q, cu, longest), run(q, cu, longest))

    def drop(q):
        return flash_attn.flash_attn_func(q[None], q[None], q[None], dropout_p=0.5)

    masks = torch.compile(drop, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    a, b = masks(q), masks(q)
    assert not torch.equal(a, b)
    torch.manual_seed(0)
    assert torch.equal(masks(q), a)


def test_bc62_compile_cache_step(device):
    """A decode step with an append: one graph, no recompilation for new lengths, the caches
    change."""
    torch.compiler.reset()
    q, new = (torch.randn(2, 1, 2, 16, device=device) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k_cache, v_cache, k, v, lengths):
        out = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        )
        return out + k_cache.sum()

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (0, 3, 4):
        caches = [torch.randn(2, 8, 2, 16, device=device) for _ in "kv"]
        copies = [x.clone() for x in caches]
        lengths = torch.full((2,), length, dtype=torch.int32, device=device)
        expected = step(q, *caches, new, new, lengths)
        torch.testing.assert_close(compiled(q, *copies, new, new, lengths), expected)
        assert torch.equal(caches[0], copies[0])
    assert counter.frame_count == 1


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 16)).unbind(2)
        return flash_attn.flash_attn_func(q, k, v, causal=True).flatten(2)


def test_export_dynamic(device):
    """The operator is one node; batch and length stay symbolic."""
    block, x = Block().to(device), torch.randn(2, 10, 32, device=device)
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=2)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {0: batch, 1: length}})
    calls = [node for node in program.graph.nodes if "flash_attn" in str(node.target)]
    assert len(calls) == 1
    other = torch.randn(3, 17, 32, device=device)
    torch.testing.assert_close(program.module()(other), block(other))
    torch.testing.assert_close(program.run_decompositions().module()(other), block(other))


def test_transforms_grad_and_vmap(device):
    q, k, v = (torch.randn(3, 2, 6, 2, 8, device=device) for _ in range(3))

    def loss(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True).square().sum()

    grads = torch.stack([torch.func.grad(loss)(*x) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(q, k, v), grads)
    mapped = torch.vmap(flash_attn.flash_attn_func)(q, k, v)
    torch.testing.assert_close(mapped[1], flash_attn.flash_attn_func(q[1], k[1], v[1]))
    # One argument mapped, the others shared.
    mixed = torch.vmap(flash_attn.flash_attn_func, (0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(mixed[2], flash_attn.flash_attn_func(q[2], k[0], v[0]))
