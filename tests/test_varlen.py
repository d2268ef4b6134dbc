# SPDX-License-Identifier: BSD-3-Clause
"""Packed sequences: parity, spare rows, hints, forms, seqused_k, paged keys."""

import cases
import pytest
import torch
from problem import SPARE_ROWS, Problem, assert_copies, check

import flash_attn

PACKED = [case for case in cases.ALL if case.packed] + [
    cases.Case(packed=True, seqlen_q=q, seqlen_k=k, dtype=dtype, causal=causal, head_dim=32)
    for q, k, dtype, causal in [
        (129, 129, "bf16", True),
        (129, 257, "fp32", True),
        (257, 64, "fp16", False),
        (7, 5, "fp64", True),
    ]
]


@pytest.mark.parametrize("case", PACKED, ids=cases.ids)
def test_varlen(case, device):
    check(case, device)


@pytest.mark.parametrize("case", PACKED[:6], ids=cases.ids)
def test_varlen_reference_backend(case, device):
    check(case, device, backend="reference")


@pytest.mark.parametrize("sinks", [False, True])
def test_varlen_spare_rows(sinks, device):
    """Rows past cu_seqlens[-1]: out 0, lse -inf (sink or not), gradients 0."""
    problem = Problem(cases.Case(packed=True, dtype="bf16", sinks=sinks, lse_grad=True), device)
    found = problem.ours()
    for name in ("out", "dq", "dk", "dv"):
        assert not found[name][-SPARE_ROWS:].any(), name
        assert found[name].isfinite().all(), name
    assert (found["lse"][:, -SPARE_ROWS:] == float("-inf")).all()


def test_varlen_equals_dense(device):
    """Equal lengths packed give the dense result, bit by bit."""
    q, k, v = (torch.randn(3, n, 4, 32, device=device) for n in (40, 56, 56))
    cu_q, cu_k = (torch.arange(4, dtype=torch.int32, device=device) * n for n in (40, 56))
    out, lse = flash_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    packed, packed_lse = flash_attn.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, 40, 56, causal=True, return_lse=True
    )
    assert torch.equal(packed.unflatten(0, (3, 40)), out)
    assert torch.equal(packed_lse.unflatten(1, (3, 40)), lse.transpose(0, 1))


@pytest.mark.parametrize("hint", [0, 1, 64, 10_000, None, "tensor"])
def test_bc64_max_seqlen_is_a_hint(hint, device):
    problem = Problem(cases.Case(packed=True, causal=True), device)
    expected = problem.call()
    q, k, v = (problem.leaves[name] for name in "qkv")
    if hint == "tensor":
        hint = torch.tensor(3, device=device)
    hints = {} if hint is None else {"max_seqlen_q": hint, "max_seqlen_k": hint}
    found = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=problem.cu_q, cu_seqlens_k=problem.cu_k, causal=True, **hints
    )
    assert torch.equal(found, expected)


def test_varlen_int64_lengths(device):
    problem = Problem(cases.Case(packed=True), device)
    expected = problem.call()
    problem.cu_q, problem.cu_k = problem.cu_q.long(), problem.cu_k.long()
    assert torch.equal(problem.call(), expected)


def test_varlen_packed_forms(device):
    """qkvpacked and kvpacked equal the plain form; one cu_seqlens object serves both sides."""
    cu = torch.tensor([0, 5, 5, 17], dtype=torch.int32, device=device)
    qkv = torch.randn(17, 3, 4, 16, device=device, requires_grad=True)
    q, k, v = qkv.unbind(1)
    plain = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, causal=True)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 12, causal=True)
    half = flash_attn.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 12, 12, causal=True)
    assert torch.equal(plain, packed) and torch.equal(plain, half)
    dout = torch.randn_like(plain)
    (a,) = torch.autograd.grad(plain, qkv, dout, retain_graph=True)
    (b,) = torch.autograd.grad(packed, qkv, dout)
    (c,) = torch.autograd.grad(half, qkv, dout)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, c)


def test_varlen_seqused_k(device):
    """Live lengths shorter than the room: NaN in the rest, gradients there 0; with causal
    alignment."""
    cu_q = torch.tensor([0, 6, 10], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 9, 20], dtype=torch.int32, device=device)
    used = torch.tensor([7, 4], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(n, 2, 16, device=device) for n in (10, 20, 20))
    live = torch.cat([torch.arange(7), torch.arange(9, 13)]).to(device)
    k2, v2 = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    k2[live], v2[live] = k[live], v[live]
    q, k2, v2 = (x.requires_grad_() for x in (q, k2, v2))
    out, lse = flash_attn.flash_attn_varlen_func(
        q, k2, v2, cu_q, cu_k, 6, 11, causal=True, seqused_k=used, return_lse=True
    )
    short = torch.tensor([0, 7, 11], dtype=torch.int32, device=device)
    kl, vl = (x[live].detach().requires_grad_() for x in (k, v))
    out2, lse2 = flash_attn.flash_attn_varlen_func(
        q, kl, vl, cu_q, short, 6, 7, causal=True, return_lse=True
    )
    torch.testing.assert_close(out, out2)
    torch.testing.assert_close(lse, lse2)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k2, v2), dout)
    expected = torch.autograd.grad(out2, (q, kl, vl), dout)
    torch.testing.assert_close(grads[0], expected[0])
    for grad, exact in zip(grads[1:], expected[1:], strict=True):
        torch.testing.assert_close(grad[live], exact)
        rest = torch.ones(20, dtype=torch.bool, device=device)
        rest[live] = False
        assert not grad[rest].any()


def test_varlen_seqused_k_in_packed_forms(device):
    cu = torch.tensor([0, 5, 17], dtype=torch.int32, device=device)
    used = torch.tensor([2, 9], dtype=torch.int32, device=device)
    qkv = torch.randn(17, 3, 2, 16, device=device)
    plain = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 12, 12, seqused_k=used)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 12, seqused_k=used)
    half = flash_attn.flash_attn_varlen_kvpacked_func(
        qkv[:, 0], qkv[:, 1:], cu, cu, 12, 12, seqused_k=used
    )
    assert torch.equal(plain, packed) and torch.equal(plain, half)


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_varlen_paged_keys(page_size, device):
    """k and v as pages with a block table; entries of -1 and unused slots are never read."""
    lens_q, lens_k = [5, 0, 9], [37, 4, 9]
    cu_q = torch.tensor([0, 5, 5, 14], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 37, 41, 50], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(n, 2, 16, device=device) for n in (14, 50, 50))
    pages = [-(-n // page_size) for n in lens_k]
    order = torch.randperm(sum(pages))
    table = torch.full((3, max(pages) + 1), -1, dtype=torch.int32)
    caches = [torch.full((sum(pages), page_size, 2, 16), float("nan"), device=device) for _ in "kv"]
    taken = 0
    for b, n in enumerate(lens_k):
        table[b, : pages[b]] = order[taken : taken + pages[b]]
        taken += pages[b]
        for j in range(n):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[table[b, j // page_size], j % page_size] = x[cu_k[b] + j]
    assert lens_q == cu_q.diff().tolist()
    with torch.no_grad():
        found = flash_attn.flash_attn_varlen_func(
            q, *caches, cu_q, cu_k, 9, 37, causal=True, block_table=table.to(device)
        )
        expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 37, causal=True)
    torch.testing.assert_close(found, expected)


def test_varlen_no_sequences(device):
    """A batch of zero sequences, with and without spare rows."""
    cu = torch.zeros(1, dtype=torch.int32, device=device)
    for rows in (0, 4):
        q = torch.full((rows, 2, 8), float("nan"), device=device, requires_grad=True)
        out, lse = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 0, 0, return_lse=True)
        assert out.shape == (rows, 2, 8) and not out.any()
        assert (lse == float("-inf")).all()
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert not grad.any()


def test_varlen_many_sequences(device):
    """65,536 sequences of length 1 and 80,000 of length up to 3: no grid limit."""
    q = torch.randn(65_536, 1, 8, device=device, requires_grad=True)
    cu = torch.arange(65_537, dtype=torch.int32, device=device)
    out = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 1, 1)
    assert_copies(out, q)
    (grad,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(grad, torch.ones_like(grad))
