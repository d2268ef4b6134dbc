# SPDX-License-Identifier: BSD-3-Clause
"""The forward pass of the dense functions against the oracle; layouts; the public forms of one
call."""

import cases
import pytest
import torch
from problem import Problem, assert_copies, check, poison

import flash_attn

DENSE = [case for case in cases.forward_only(cases.ALL) if not case.packed]


@pytest.mark.parametrize("case", DENSE, ids=cases.ids)
def test_forward(case, device):
    check(case, device, gradients=False)


@pytest.mark.parametrize("case", cases.REGULAR[:4] + cases.FEATURES[:8], ids=cases.ids)
def test_forward_reference_backend(case, device):
    check(case, device, backend="reference", gradients=False)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_forward_two_threads_one_long_sequence(two_threads, dtype, device):
    case = cases.Case(
        batch=1, seqlen_q=700, seqlen_k=900, heads=1, heads_k=1, dtype=dtype, causal=True
    )
    check(case, device, gradients=False)


def test_forward_inputs_untouched(device):
    problem = Problem(cases.Case(causal=True), device)
    before = {name: x.detach().clone() for name, x in problem.leaves.items()}
    problem.ours()
    for name, x in before.items():
        assert torch.equal(problem.leaves[name], x), name


def test_forward_without_grad_equals_with_grad(device):
    problem = Problem(cases.Case(dtype="bf16", causal=True), device)
    with_grad = problem.call(return_lse=True)
    with torch.no_grad():
        without = problem.call(return_lse=True)
    assert torch.equal(with_grad[0], without[0]) and torch.equal(with_grad[1], without[1])
    assert with_grad[0].requires_grad and not without[0].requires_grad


def test_forward_returns(device):
    q = torch.randn(2, 5, 4, 8, device=device)
    assert isinstance(flash_attn.flash_attn_func(q, q, q), torch.Tensor)
    assert len(flash_attn.flash_attn_func(q, q, q, return_lse=True)) == 2
    out, lse, probs = flash_attn.flash_attn_func(q, q, q, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and probs.numel() == 0
    # FA2's flag wins over ours.
    assert len(flash_attn.flash_attn_func(q, q, q, return_attn_probs=True, return_lse=True)) == 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["plain", "kvpacked", "qkvpacked"])
def test_forward_returns_of_every_form(form, packed, device):
    """out, or (out, lse), or (out, lse, S_dmask), by the same rule everywhere."""
    qkv = torch.randn(*((6,) if packed else (2, 3)), 3, 2, 8, device=device)
    given = {
        "plain": qkv.unbind(-3),
        "kvpacked": (qkv.select(-3, 0), qkv.narrow(-3, 1, 2)),
        "qkvpacked": (qkv,),
    }[form]
    suffix = "" if form == "plain" else f"_{form}"
    call = getattr(flash_attn, f"flash_attn{'_varlen' if packed else ''}{suffix}_func")
    if packed:
        cu = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
        given = (*given, cu) if form == "qkvpacked" else (*given, cu, cu)
    alone = call(*given)
    out, lse = call(*given, return_lse=True)
    for more in ({}, {"return_lse": True}):
        three = call(*given, return_attn_probs=True, **more)
        assert torch.equal(three[0], alone) and torch.equal(three[1], lse) and len(three) == 3
    assert torch.equal(out, alone) and lse.shape == ((2, 6) if packed else (2, 2, 3))


@pytest.mark.parametrize("dims", [(513, 1), (700, 1030)])
def test_forward_head_dims_beyond_any_kernel_of_a_gpu(dims):
    """The CPU has no largest one, gradients included."""
    check(cases.Case(1, 9, 12, 2, 1, *dims, causal=True, lse_grad=True))


def test_forward_window_kinds(device):
    """A tuple, a list and a CPU integer tensor mean the same."""
    q = torch.randn(1, 9, 2, 8, device=device)
    expected = flash_attn.flash_attn_func(q, q, q, window_size=(2, 1))
    for window in ([2, 1], torch.tensor([2, 1]), torch.Size([2, 1])):
        assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=window), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_packed_forms(causal, device):
    """qkvpacked and kvpacked equal the plain form, gradients too."""
    q, k, v = (torch.randn(2, 17, 4, 16, device=device) for _ in range(3))
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    kv = torch.stack([k, v], 2).requires_grad_()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    plain = flash_attn.flash_attn_func(q, k, v, causal=causal)
    packed = flash_attn.flash_attn_qkvpacked_func(qkv, causal=causal)
    half = flash_attn.flash_attn_kvpacked_func(q, kv, causal=causal)
    assert torch.equal(plain, packed) and torch.equal(plain, half)
    dout = torch.randn_like(plain)
    dq, dk, dv = torch.autograd.grad(plain, (q, k, v), dout)
    (dqkv,) = torch.autograd.grad(packed, qkv, dout)
    torch.testing.assert_close(dqkv, torch.stack([dq, dk, dv], 2))
    dq2, dkv = torch.autograd.grad(half, (q, kv), dout)
    torch.testing.assert_close(dq2, dq)
    torch.testing.assert_close(dkv, torch.stack([dk, dv], 2))


def test_forward_kvpacked_gqa(device):
    q = torch.randn(1, 6, 6, 8, device=device)
    kv = torch.randn(1, 9, 2, 2, 8, device=device)
    expected = flash_attn.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1])
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv), expected)


def test_forward_autocast():
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    k, v = (torch.randn(1, 8, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn.flash_attn_func(q, k, v)
    expected = flash_attn.flash_attn_func(q.bfloat16(), k, v)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["dominant", "shifted", "huge", "one_hot", "constant", "heavy"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_forward_structured_values(kind, dtype, device):
    """Values that randn never shows: a dominant channel, all logits near -120 or -2.5e5, one-hot
    rows."""
    case = cases.Case(seqlen_q=70, seqlen_k=90, head_dim=64, dtype=dtype, causal=True)
    problem = Problem(case, device)
    with torch.no_grad():
        for name in "qk":
            x = problem.leaves[name]
            if kind == "dominant":
                x[..., 0] *= 20
            elif kind == "shifted":
                x[..., 0] = 1.0 if name == "q" else -120.0 * 8
            elif kind == "huge":
                x[..., 0] = 448.0 if name == "q" else -547.0
            elif kind == "one_hot":
                x.zero_()[..., 3] = 30.0 * torch.arange(x.shape[1], device=device)[:, None] % 7
            elif kind == "constant":
                x.fill_(0.5)
            else:
                x.copy_(x.sign() * x.abs() ** 3)
    check(case, device, problem=problem)


def test_forward_many_small_problems(device):
    """More sequences and heads than 65,535."""
    q = torch.randn(1, 1, 66_000, 4, device=device)
    assert_copies(flash_attn.flash_attn_func(q, q, q), q)
    q = torch.randn(66_000, 1, 1, 4, device=device)
    assert_copies(flash_attn.flash_attn_func(q, q, q), q)


def test_forward_odd_pointer(device):
    """A tensor that starts two bytes into its buffer, and a split of a packed projection with
    head_dim 46."""
    flat = torch.randn(1 + 2 * 9 * 3 * 46, device=device).bfloat16()
    q = flat[1:].view(2, 9, 3, 46)
    expected = flash_attn.flash_attn_func(q.clone(), q.clone(), q.clone(), causal=True)
    assert torch.equal(flash_attn.flash_attn_func(q, q, q, causal=True), expected)
    qkv = torch.randn(2, 9, 3 * 3 * 46, device=device).bfloat16()
    q, k, v = (x.unflatten(2, (3, 46)) for x in qkv.split(3 * 46, 2))
    expected = flash_attn.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(flash_attn.flash_attn_func(q, k, v), expected)


@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (2, 3), (1, 3)])
def test_forward_transposed_storage(dims, device):
    """Any strides; a last stride other than 1 is copied."""
    q, k, v = (torch.randn(3, 8, 4, 8, device=device) for _ in range(3))
    expected = flash_attn.flash_attn_func(q, k, v)
    turned = [x.transpose(*dims).contiguous().transpose(*dims) for x in (q, k, v)]
    assert torch.equal(flash_attn.flash_attn_func(*turned), expected)
    assert torch.equal(flash_attn.flash_attn_func(*map(poison, turned)), expected)
