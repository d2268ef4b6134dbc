# SPDX-License-Identifier: BSD-3-Clause
"""Public bug reports as tests, by the numbers of the project's list of cases: masks, sizes, rows,
strides. The others stand in test_bug_cases_numerics.py and test_bug_cases_api.py."""

import cases
import pytest
import torch
from problem import Problem, assert_copies, check, has_backward

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func

NEG_INF = float("-inf")


def near(dtype):
    """How close two results in one dtype are that round their probabilities differently."""
    return {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-8}


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bc01_causal_varlen_most_rows_see_no_key(dtype, device):
    cu_q, cu_k = ints([0, 76, 110, 256], device), ints([0, 1, 2, 3], device)
    q, k, v = (
        (torch.randn(n, 1, 32, device=device) * 3).to(dtype).requires_grad_() for n in (256, 3, 3)
    )
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 146, 1, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    last = [75, 109, 255]
    empty = [i for i in range(256) if i not in last]
    assert not out[empty].any() and (lse[0, empty] == NEG_INF).all()
    assert_copies(out[last], v)
    assert not dq[empty].any()
    # One key: dq and dk are 0 up to the rounding of rowsum(out * dout) against dout @ v, whose
    # terms add up to about 80, times k.
    assert max(dq.abs().max(), dk.abs().max()) < 80 * 9 * 2**-20
    assert_copies(dv, torch.ones_like(dv))


def test_bc02_dense_causal_more_queries_than_keys(device):
    q, k, v = (torch.randn(1, n, 2, 8, device=device, requires_grad=True) for n in (5, 2, 2))
    out = flash_attn_func(q, k, v, causal=True)
    assert not out[:, :3].any() and out[:, 4].any()
    assert_copies(out[:, 3], v[:, 0])
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    rows = [line.split() for line in flash_attn_func.__doc__.splitlines()]
    assert ["1", "1", "1", "1", "0", "0", "0"] in rows  # the docstring's picture


def test_bc03_empty_row_lse(device):
    q, k = torch.randn(1, 4, 2, 8, device=device), torch.randn(1, 6, 2, 8, device=device)
    empty, empty_lse = flash_attn_func(q, k[:, :0], k[:, :0], return_lse=True)
    full, full_lse = flash_attn_func(q, k, k, return_lse=True)
    assert not empty.any() and (empty_lse == NEG_INF).all()
    total = torch.logaddexp(empty_lse, full_lse)
    assert torch.equal(total, full_lse)
    merged = sum(
        out * (lse - total).exp().transpose(1, 2)[..., None]
        for out, lse in ((empty, empty_lse), (full, full_lse))
    )
    assert torch.equal(merged, full)


def test_bc05_window_unequal_lengths(device):
    case = cases.Case(seqlen_q=129, seqlen_k=50, window=(32, 64))
    check(case, device)
    problem = Problem(case, device)
    out, lse = problem.call(return_lse=True)
    assert not out[:, :15].any() and (lse[:, :, :15] == NEG_INF).all()
    assert lse[:, :, 15:].isfinite().all()
    assert "(bottom-right aligned)" in flash_attn_func.__doc__


def test_bc06_window_counts_self(device):
    """A model's window of W tokens, self included, is window_size=(W - 1, 0)."""
    q, k, v = (torch.randn(1, 64, 2, 16, device=device) for _ in range(3))
    i = torch.arange(64, device=device)
    eager = (i[:, None] >= i) & (i[:, None] - i < 8)
    expected = flash_attn_func(q, k, v, attn_bias=eager)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True, window_size=(7, 0)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bc07_equivalent_windows(dtype, device):
    q, k, v = (torch.randn(1, 300, 2, 32, device=device).to(dtype) for _ in range(3))
    expected = flash_attn_func(q, k, v, causal=True)
    for window in ((-1, 0), (300, 0), (299, 0)):
        torch.testing.assert_close(flash_attn_func(q, k, v, window_size=window), expected)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, window_size=(0, 0))
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert_copies(out, v)
    torch.testing.assert_close(dv, dout)
    # out * dout summed twice in different orders: the difference is rounding alone.
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4


@pytest.mark.parametrize("window", [(-1, -3), (-2, 0), (-7, -7)])
def test_bc08_negative_windows_raise(window, device):
    q = torch.randn(1, 4, 1, 8, device=device)
    with pytest.raises(ValueError, match="-1"):
        flash_attn_func(q, q, q, causal=True, window_size=window)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["causal", "window", "blocks", "bias"])
def test_bc09_all_logits_negative_first_block_masked(mask, dtype, device):
    case = {
        "causal": cases.Case(causal=True),
        "window": cases.Case(window=(60, 10)),
        "blocks": cases.Case(blocks=(16, 64)),
        "bias": cases.Case(bias="mask"),
    }[mask]
    shape = {"batch": 1, "seqlen_q": 88, "seqlen_k": 448, "heads": 14, "heads_k": 2, "dtype": dtype}
    case = cases.replace(case, **shape)
    problem = Problem(case, device)
    with torch.no_grad():
        for name, value in (("q", 40.0), ("k", -40.0)):
            problem.leaves[name] *= 0.1
            problem.leaves[name][..., 0] += value
    check(case, device, problem=problem)
    out, lse = problem.call(return_lse=True)
    alive = (lse > NEG_INF).transpose(1, 2)
    assert lse[lse > NEG_INF].max() < -100 and out[alive].norm(dim=-1).min() > 1e-2


def test_bc10_boolean_mask_rows_and_heads(device):
    q = torch.randn(1, 6, 2, 8, device=device, requires_grad=True)
    k, v = (torch.randn(1, 10, 2, 8, device=device, requires_grad=True) for _ in "kv")
    mask = torch.rand(1, 2, 6, 10, device=device) < 0.7
    mask[..., 0] = True
    mask[:, :, 5] = False
    mask[:, 1] = False
    out = flash_attn_func(q, k, v, attn_bias=mask)
    assert not out[:, 5].any() and not out[:, :, 1].any() and out[:, :5, 0].any(-1).all()
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][:, 5].any() and not any(g[:, :, 1].any() for g in grads)


@pytest.mark.parametrize("name", ["k", "v"])
def test_bc12_nan_past_the_sequence_does_not_leak(name, device):
    """Structural end of the keys (seqused_k). A key hidden by a mask must be finite: the docs say
    so."""
    leaves = {n: torch.randn(2, 1, 4, device=device) for n in "qkv"}
    cu, used = ints([0, 2], device), ints([1], device)
    expected = flash_attn_varlen_func(**leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_k=used)
    leaves[name][1] = float("nan")
    found = flash_attn_varlen_func(**leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_k=used)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "lengths,capacity,page", [([1, 3], 3, 0), ([32, 64, 96, 48], 128, 0), ([13], 16, 4)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bc13_nan_in_unused_cache_slots(lengths, capacity, page, value, device):
    batch = len(lengths)
    q = torch.randn(batch, 1, 2, 64, device=device)
    caches = [torch.randn(batch, capacity, 2, 64, device=device) for _ in "kv"]
    found = []
    for fill in (0.0, value):
        for cache in caches:
            for b, n in enumerate(lengths):
                cache[b, n:] = fill
        table, views = None, caches
        if page:
            views = [x.view(-1, page, 2, 64) for x in caches]
            table = torch.arange(batch * capacity // page, device=device).view(batch, -1)
        found.append(
            flash_attn.flash_attn_with_kvcache(
                q, *views, cache_seqlens=ints(lengths, device), block_table=table
            )
        )
    assert torch.equal(*found)


@pytest.mark.parametrize("lens_q", [(1, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bc15_varlen_decode_with_empty_sequences(lens_q, dtype, device):
    cu_q = ints([0, *torch.tensor(lens_q).cumsum(0).tolist()], device)
    cu_k = ints([0, 3, 3, 8], device)
    q = torch.randn(sum(lens_q), 9, 64, device=device).to(dtype)
    k, v = (torch.randn(8, 3, 64, device=device).to(dtype) for _ in "kv")
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(lens_q), 5, causal=True)
    expected = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(lens_q), 5, causal=True, backend="reference"
    )
    torch.testing.assert_close(out, expected, **near(dtype))


def test_bc17_zero_length_keys_in_varlen(device):
    cu_q, cu_k = ints([0, 64, 128, 192], device), ints([0, 64, 64, 128], device)
    q = torch.randn(192, 2, 64, device=device).half().requires_grad_()
    k, v = (torch.randn(128, 2, 64, device=device).half().requires_grad_() for _ in "kv")
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 64, 64, return_lse=True)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not out[64:128].any() and (lse[:, 64:128] == NEG_INF).all() and not dq[64:128].any()
    alone = flash_attn_func(q[None, :64], k[None, :64], v[None, :64])
    torch.testing.assert_close(out[:64], alone[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 8, 0, 4), (0, 8, 8, 4), (2, 0, 8, 4), (2, 8, 8, 0), (0, 0, 0, 0)]
)
def test_bc18_zero_sizes(causal, shape, device):
    batch, seqlen_q, seqlen_k, heads = shape
    q = torch.randn(batch, seqlen_q, heads, 64, device=device, requires_grad=True)
    k, v = (
        torch.randn(batch, seqlen_k, heads, 64, device=device, requires_grad=True) for _ in "kv"
    )
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape and not out.any() and (lse == NEG_INF).all()
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_bc19_zero_length_queries_in_backward(device):
    cu_q, cu_k = ([0, 0, 75, 128, 128], [0, 158, 267, 320, 512])
    q = torch.randn(128, 4, 256, device=device).bfloat16().requires_grad_()
    k, v = (torch.randn(512, 1, 256, device=device).bfloat16().requires_grad_() for _ in "kv")
    out = flash_attn_varlen_func(
        q, k, v, ints(cu_q, device), ints(cu_k, device), 75, 192, causal=True
    )
    for grad in torch.autograd.grad(out, (k, v), torch.randn_like(out)):
        assert not grad[:158].any() and not grad[320:].any() and grad.isfinite().all()
        assert grad[158:320].any()


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("dim", [8, 16, 32])
def test_bc20_everything_of_size_one(dtype, dim, device):
    q, k, v = (
        (torch.randn(1, 1, 1, dim, device=device) * 3).to(cases.DTYPES[dtype]).requires_grad_()
        for _ in range(3)
    )
    out = flash_attn_func(q, k, v)
    dout = torch.ones_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert_copies(out, v)
    assert_copies(dv, dout)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-2 if dtype == "fp16" else not dq.isnan().any()
    for lengths in ((1, 2), (2, 1), (2, 3), (3, 3)):
        case = cases.Case(1, *lengths, 1, 1, dim, dtype=dtype)
        check(case, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bc21_empty_heads_on_the_cpu(dtype):
    q, k = torch.empty(7, 0, 9, 7, dtype=dtype), torch.empty(7, 0, 7, 7, dtype=dtype)
    with pytest.raises(ValueError, match="num_heads"):
        flash_attn_func(q, k, k, causal=True)
    with pytest.raises(ValueError, match="num_heads"):
        flash_attn_func(torch.empty(7, 3, 9, 7), torch.empty(7, 3, 0, 7), torch.empty(7, 3, 0, 7))
    assert flash_attn_func(q, q, q, causal=True).shape == q.shape


@pytest.mark.parametrize("num_splits", [0, 1, 2])
def test_bc23_paged_rows_are_all_written(num_splits, device):
    """The output's memory held NaN before: every row is written."""
    caches = [torch.randn(8, 256, 4, 64, device=device).bfloat16() for _ in "kv"]
    table = torch.randperm(8, device=device).view(2, 4)
    q = torch.randn(2, 1, 4, 64, device=device).bfloat16()
    lengths = ints([700, 1], device)
    poison = [torch.full_like(q, float("nan")) for _ in range(4)]
    del poison
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=table, num_splits=num_splits
    )
    expected = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=table, backend="reference"
    )
    torch.testing.assert_close(out, expected, **near(torch.bfloat16))


def test_bc24_tokens_beyond_the_last_sequence(device):
    cu = ints([0, 144, 432, 944], device)
    q, k, v = (torch.randn(946, 2, 64, device=device) for _ in range(3))
    for x in (q, k, v):
        x[944:] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    poison = [torch.full((946, 2, 64), float("nan"), device=device) for _ in range(8)]
    del poison
    out, lse = flash_attn_varlen_func(*leaves, cu, cu, 512, 512, causal=True, return_lse=True)
    assert not out[944:].any() and (lse[:, 944:] == NEG_INF).all() and out.isfinite().all()
    for grad in torch.autograd.grad(out, leaves, torch.randn_like(out)):
        assert not grad[944:].any() and grad.isfinite().all()


def test_bc26_expanded_scalar_gradient(device):
    q, k, v = (torch.randn(1, 5, 2, 8, device=device).bfloat16().requires_grad_() for _ in range(3))
    flash_attn_func(q, k, v, causal=True, deterministic=True).sum().backward()
    out = flash_attn_func(q, k, v, causal=True, deterministic=True)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for x, grad in zip((q, k, v), expected, strict=True):
        assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("turned", ["q", "k", "v"])
@pytest.mark.parametrize("packed", [False, True])
def test_bc28_last_stride_not_one(turned, packed, device):
    leaves = {n: torch.randn(2, 64, 4, 32, device=device) for n in "qkv"}
    cu = ints([0, 30, 128], device)

    def run(tensors):
        if not packed:
            return flash_attn_func(*tensors, causal=True, deterministic=True)
        flat = (x.flatten(0, 1) for x in tensors)
        return flash_attn_varlen_func(*flat, cu, cu, 98, 98, causal=True, deterministic=True)

    results = []
    for turn in (False, True):
        x = dict(leaves)
        if turn:
            x[turned] = x[turned].transpose(2, 3).contiguous().transpose(2, 3)
        x = [t.detach().requires_grad_() for t in x.values()]
        out = run(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("seqlen_k", [33, 65, 97])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("masked", [False, True])
def test_bc30_keys_expanded_over_heads(seqlen_k, dim, masked, device):
    q = torch.randn(1, 20, 8, dim, device=device).bfloat16()
    one = [
        torch.randn(1, seqlen_k, 1, dim, device=device).bfloat16().requires_grad_() for _ in "kv"
    ]
    mask = (torch.rand(1, 1, 20, seqlen_k, device=device) < 0.7) if masked else None
    wide = [x.expand(-1, -1, 8, -1) for x in one]
    copies = [x.detach().contiguous().requires_grad_() for x in wide]
    out = flash_attn_func(q, *wide, attn_bias=mask)
    assert torch.equal(out, flash_attn_func(q, *copies, attn_bias=mask))
    if not has_backward(device, dim):
        return
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, one, dout)
    expected = torch.autograd.grad(flash_attn_func(q, *copies, attn_bias=mask), copies, dout)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(
            a, b.float().sum(2, keepdim=True).bfloat16(), rtol=2e-2, atol=2e-2
        )


def test_bc34_size_one_dims_with_strange_strides(device):
    q = torch.randn(1, 1, 1, 2, device=device).transpose(2, 3)
    assert q.stride(-1) == 2 or q.shape[-1] == 1
    assert_copies(flash_attn_func(q, q, q), q)
    x = torch.randn(1, 6, 1, 8, device=device)
    odd = x.as_strided(x.shape, (1 << 40, 8, 1 << 41, 1))
    zero = x.as_strided(x.shape, (0, 8, 0, 1))
    expected = flash_attn_func(x, x, x, causal=True)
    assert torch.equal(flash_attn_func(odd, zero, odd, causal=True), expected)
