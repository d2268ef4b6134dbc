# SPDX-License-Identifier: BSD-3-Clause
"""Offsets beyond 32 bits and more than 65,535 of anything. Strides past 2^31 elements come from
views of one big buffer of which only a few pages are touched; sizes past 2^31 elements are real,
and cheap because there are few keys."""

import fcntl
import math
import tempfile
from pathlib import Path

import cases
import pytest
import torch
from conftest import needs_cuda
from problem import check

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = needs_cuda

FAR = 2**31 + 8  # elements; a multiple of 16 bytes in every dtype


@pytest.fixture
def need_memory():
    """need_memory(gib) skips where that much is not free; one such test at a time, of all
    workers."""

    def need(gib):
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gib + 1:
            pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} are free")

    with (Path(tempfile.gettempdir()) / "flash_attn_test_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield need
        torch.cuda.empty_cache()


def far_apart(x, dim):
    """A copy of x whose dimension `dim`, of size 2, has a stride of FAR elements."""
    sizes, strides, step = list(x.shape), [], 1
    for d in reversed(range(x.dim())):
        strides.insert(0, FAR if d == dim else step)
        step *= 1 if d == dim else sizes[d]
    buffer = torch.empty(FAR + step, dtype=x.dtype, device=x.device)
    view = buffer.as_strided(sizes, strides)
    view.copy_(x.detach())
    return view


def results(q, k, v, dout, **options):
    """out, lse and gradients, the same bits each run."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    bias = options.get("attn_bias")
    if bias is not None:
        options["attn_bias"] = bias.detach().requires_grad_()
    out, lse = flash_attn_func(*leaves, return_lse=True, deterministic=True, **options)
    leaves += [options["attn_bias"]] if bias is not None else []
    return out, lse, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "bias"])
def test_large_strides(name, dim, need_memory):
    """Each tensor in turn, with batch, position or head far away."""
    need_memory(10)
    shape = [2, 2, 2, 64] if dim == 1 else [2, 70, 2, 64]
    tensors = {key: torch.randn(shape, device="cuda").bfloat16() for key in ("q", "k", "v", "dout")}
    bias = torch.randn(2, 2, shape[1], shape[1], device="cuda").bfloat16()
    if name == "bias" and dim == 2:
        tensors = {key: x[:, :2] for key, x in tensors.items()}
        bias = bias[:, :, :2, :2]
    options = {"attn_bias": bias} if name == "bias" else {"causal": True}
    expected = results(**tensors, **options)
    if name == "bias":
        options["attn_bias"] = far_apart(bias, dim)
    else:
        tensors[name] = far_apart(tensors[name], dim)
    for found, exact in zip(results(**tensors, **options), expected, strict=True):
        assert torch.equal(found, exact)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_bc37_large_row_strides(name, need_memory):
    """Packed rows 2^20 elements apart: row 2,048 and what follows stand beyond 2^31."""
    need_memory(6)
    rows = 2100
    cu = torch.tensor([0, 900, rows], dtype=torch.int32, device="cuda")
    tensors = {
        key: torch.randn(rows, 1, 64, device="cuda").bfloat16() for key in ("q", "k", "v", "dout")
    }

    def run(q, k, v, dout):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, cu, cu, 1200, 1200, deterministic=True)
        return out, *torch.autograd.grad(out, leaves, dout)

    expected = run(**tensors)
    buffer = torch.empty(rows * 2**20, dtype=torch.bfloat16, device="cuda")
    wide = buffer.view(rows, 1, 2**20)[..., :64]
    tensors[name] = wide.copy_(tensors[name])
    for found, exact in zip(run(**tensors), expected, strict=True):
        assert torch.equal(found, exact)


def test_large_output_and_gradient(need_memory):
    """More than 2^31 elements of q, out, dout, dq and its accumulator; sixteen keys."""
    need_memory(36)
    heads, dim = 64, 256
    length = 2**31 // (heads * dim) + 100
    q, dout = (
        torch.zeros(1, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    k, v = (torch.randn(1, 16, heads, dim, device="cuda").bfloat16() for _ in "kv")
    tail = slice(length - 300, length)
    q[:, tail] = torch.randn(1, 300, heads, dim, device="cuda").bfloat16()
    dout[:, tail] = torch.randn(1, 300, heads, dim, device="cuda").bfloat16()
    expected = results(q[:, tail], k, v, dout[:, tail])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(out[:, tail], expected[0]) and torch.equal(lse[..., tail], expected[1])
    # Kernels of the deterministic kind round other sums to bf16 on their way.
    for found, exact in zip((dq[:, tail], dk, dv), expected[2:], strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=2**-7 * float(exact.abs().max()))
    assert not dq[:, :1000].any() and out[:, 1000].any()


def test_large_lse(need_memory):
    """More than 2^31 rows in all, so lse itself is beyond 32 bits."""
    need_memory(20)
    heads = 1024
    length = 2**31 // heads + 10
    q = torch.zeros(1, length, heads, 1, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 8, heads, 1, device="cuda").bfloat16()
    tail = slice(length - 20, length)
    q[:, tail] = 1.0
    expected = flash_attn_func(q[:, tail], k, k, return_lse=True)
    out, lse = flash_attn_func(q, k, k, return_lse=True)
    assert torch.equal(out[:, tail], expected[0])
    assert torch.equal(lse[:, -1, tail], expected[1][:, -1])
    torch.testing.assert_close(lse[0, 0, :20], torch.full_like(lse[0, 0, :20], math.log(8)))


@pytest.mark.parametrize("append", [False, True])
def test_bc42_large_paged_cache(append, need_memory):
    """A cache of more than 2^31 elements, and a block table that names its last pages."""
    need_memory(10)
    page, heads, dim = 16, 8, 128
    pages = 2**31 // (page * heads * dim) + 10
    caches = [
        torch.empty(pages, page, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"
    ]
    small = [torch.randn(4, page, heads, dim, device="cuda").bfloat16() for _ in "kv"]
    for cache, x in zip(caches, small, strict=True):
        cache[-4:] = x
    q, k, v = (torch.randn(2, 1, n, dim, device="cuda").bfloat16() for n in (16, heads, heads))
    new = (k, v) if append else (None, None)
    lengths = torch.tensor([20, 31], dtype=torch.int32, device="cuda")
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32, device="cuda")
    expected = flash_attn_with_kvcache(
        q, *small, *new, cache_seqlens=lengths, block_table=table, causal=True
    )
    found = flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=lengths, block_table=table + (pages - 4), causal=True
    )
    assert torch.equal(found, expected)
    for cache, x in zip(caches, small, strict=True):
        assert torch.equal(cache[-4:], x)


@pytest.mark.parametrize("append", [False, True])
def test_large_contiguous_cache(append, need_memory):
    """Batch entries of a cache more than 2^31 elements apart, picked by cache_batch_idx."""
    need_memory(10)
    small = [torch.randn(2, 40, 2, 64, device="cuda").bfloat16() for _ in "kv"]
    caches = [far_apart(x, 0) for x in small]
    q, k, v = (torch.randn(2, 1, n, 64, device="cuda").bfloat16() for n in (8, 2, 2))
    new = (k, v) if append else (None, None)
    options = {
        "cache_seqlens": torch.tensor([20, 31], dtype=torch.int32, device="cuda"),
        "cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32, device="cuda"),
    }
    expected = flash_attn_with_kvcache(q, *small, *new, **options)
    assert torch.equal(flash_attn_with_kvcache(q, *caches, *new, **options), expected)
    for cache, x in zip(caches, small, strict=True):
        assert torch.equal(cache, x)


# ---- more than 65,535

MANY = 66_001
COUNTS = {
    "batches": cases.Case(MANY, 3, 5, 2, 1, 8, dtype="bf16", causal=True, lse_grad=True),
    "heads": cases.Case(1, 3, 5, MANY, MANY, 8, dtype="bf16", causal=True),
    "heads-of-one-key-head": cases.Case(1, 2, 5, MANY, 1, 8, dtype="fp16"),
    "batches-and-heads": cases.Case(300, 2, 3, 300, 300, 4, dtype="bf16", sinks=True),
    "scores": cases.Case(
        MANY, 2, 3, 2, 2, 8, dtype="bf16", slopes="batch", bias="column", softcap=2.0
    ),
    "deterministic": cases.Case(MANY, 2, 3, 2, 1, 8, dtype="bf16", deterministic=True),
    "long": cases.Case(1, 70_000 * 8, 3, 1, 1, 8, dtype="bf16"),
    "long-keys": cases.Case(1, 3, 70_000 * 8, 1, 1, 8, dtype="bf16"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_large_counts(name):
    case = COUNTS[name]
    check(cases.replace(case, contiguous=True), "cuda")


@pytest.mark.parametrize("lengths", [(1, 1), (2, 3)])
def test_large_counts_packed(lengths):
    """66,001 sequences of a few rows each, and a long one behind them, equal dense calls."""
    len_q, len_k = lengths
    long_q, long_k = 150, 200
    q, k, v = (
        torch.randn(MANY * n + last, 2, 16, device="cuda").bfloat16().requires_grad_()
        for n, last in ((len_q, long_q), (len_k, long_k), (len_k, long_k))
    )
    counts = torch.arange(MANY + 2, device="cuda", dtype=torch.int32)
    cu_q, cu_k = counts * len_q, counts * len_k
    cu_q[-1], cu_k[-1] = MANY * len_q + long_q, MANY * len_k + long_k
    options = {"causal": True, "deterministic": True}
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, long_q, long_k, **options)
    dout = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))

    sizes = (len_q, len_k, len_k)
    short = [x[: MANY * n].unflatten(0, (MANY, n)) for x, n in zip((q, k, v), sizes, strict=True)]
    tails = [x[MANY * n :][None] for x, n in zip((q, k, v), sizes, strict=True)]
    for part, rows in ((short, slice(0, MANY)), (tails, slice(MANY, None))):
        leaves = [x.detach().requires_grad_() for x in part]
        dense = flash_attn_func(*leaves, **options)
        begin = MANY * len_q
        d = dout[:begin].unflatten(0, (MANY, len_q)) if rows.start == 0 else dout[begin:][None]
        expected = (dense, *torch.autograd.grad(dense, leaves, d))
        for x, y, n in zip(found, expected, (len_q, *sizes), strict=True):
            mine = x[: MANY * n] if rows.start == 0 else x[MANY * n :]
            torch.testing.assert_close(mine, y.flatten(0, 1), rtol=1e-2, atol=1e-3)


def test_large_counts_decode():
    """66,001 sequences of a paged cache, each with a page of its own."""
    pages = torch.randn(MANY, 4, 1, 16, device="cuda").bfloat16()
    q = torch.randn(MANY, 1, 2, 16, device="cuda").bfloat16()
    lengths = (torch.arange(MANY, device="cuda") % 5).int()
    table = torch.randperm(MANY, device="cuda").int()[:, None]
    out = flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    keys = pages[table[:, 0].long()]
    visible = torch.arange(4, device="cuda") < lengths[:, None]
    expected = flash_attn_func(q, keys, keys, attn_bias=visible[:, None, None])
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "head_dim,heads,heads_k,seqlen_q,seqlen_k,options",
    [
        (64, 8, 8, 77, 300, {"causal": True}),
        (64, 8, 8, 512, 512, {"causal": True, "dropout_p": 0.1}),
        (128, 16, 4, 99, 130, {}),
        (128, 8, 8, 256, 256, {"window_size": (100, 20)}),
    ],
    ids=["d64-causal", "d64-causal-dropout", "d128-gqa4", "d128-window"],
)
def test_dq_of_many_heads(head_dim, heads, heads_k, seqlen_q, seqlen_k, options):
    """More heads than there are accumulators of dq, so that each serves several in turn; against
    the kernels that need none."""
    q = torch.randn(128, seqlen_q, heads, head_dim, device="cuda").bfloat16().requires_grad_()
    k, v = torch.randn(2, 128, seqlen_k, heads_k, head_dim, device="cuda").bfloat16()
    k.requires_grad_()
    dout = torch.randn_like(q)
    for _ in range(3):
        dqs = []
        for deterministic in (False, True):
            torch.manual_seed(0)
            out = flash_attn_func(q, k, v, deterministic=deterministic, **options)
            dqs.append(torch.autograd.grad(out, (q, k), dout)[0].float())
        assert (dqs[0] - dqs[1]).norm(dim=-1).le(0.02 * dqs[1].norm(dim=-1) + 1e-3).all()
