# SPDX-License-Identifier: BSD-3-Clause
"""Decoding on a GPU: few queries over long caches, where the keys are split between blocks; pages
of any size, left padding, cache_batch_idx, empty sequences. Against the oracle, and for real sizes
against the CPU's kernels."""

import pytest
import torch
from conftest import needs_cuda
from test_kvcache import NAN, Decode, check_decode

from flash_attn import _host as host
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = needs_cuda

LONG = {"capacity": 2600, "dtype": "bf16", "dim": 64, "dim_v": 64, "new": 1, "seqlen_q": 1}
CASES = [
    Decode((2500, 0, 1), heads=8, **LONG),
    Decode((2500, 1300), heads=16, heads_k=1, **LONG | {"dim": 128, "dim_v": 128}),
    Decode((2599,), heads=2, heads_k=2, **LONG | {"dtype": "fp16"}),
    Decode((2500, 70), **LONG | {"new": 5, "seqlen_q": 5}),
    Decode((2500, 70), **LONG | {"new": 70, "seqlen_q": 70}),
    Decode((2500, 300), causal=False, **LONG | {"new": 0, "seqlen_q": 3}),
    Decode((2500, 2000), window=(700, 0), **LONG),
    Decode((2500, 2000), causal=False, window=(700, 300), **LONG | {"seqlen_q": 4, "new": 4}),
    Decode((2500, 2000), leftpad=(2400, 5), sinks=True, **LONG),
    Decode((2500, 2000), leftpad=(2501, 2001), sinks=True, **LONG),
    Decode((2500, 2000), batch_idx=(3, 1), rotary=32, **LONG),
    Decode((2500, 2000), softcap=5.0, slopes=True, **LONG),
    Decode((2500, 2000), bias=True, sinks=True, **LONG),
    Decode((2500, 2000), blocks=True, **LONG),
    Decode((2500, 2000), **LONG | {"dim": 256, "dim_v": 256}),
    Decode((2500, 2000), **LONG | {"dim": 192, "dim_v": 128}),
    Decode((2500, 2000), **LONG | {"dim": 512, "dim_v": 512}),
    Decode((2500, 2000), **LONG | {"dim": 37, "dim_v": 80}),
    Decode((2500, 2000), **LONG | {"dtype": "fp32"}),
]
PAGED = [
    Decode((2500, 0, 700), page_size=size, **LONG | more)
    for size, more in [
        (1, {}),
        (2, {"dtype": "fp16"}),
        (7, {"rotary": 16}),
        (16, {"heads": 8}),
        (17, {"window": (900, 0)}),
        (48, {"sinks": True, "slopes": True}),
        (64, {"seqlen_q": 4, "new": 4}),
        (100, {"dim": 128, "dim_v": 128, "blocks": True}),
        (128, {"dtype": "fp32"}),
        (256, {"bias": True}),
        (1000, {"leftpad": (2000, 0, 3)}),
        (4096, {"capacity": 4096, "dim": 256, "dim_v": 256}),
    ]
]


@pytest.mark.parametrize("case", CASES + PAGED, ids=lambda case: case.id)
def test_decode(case):
    check_decode(case, "cuda")


def gpu():
    """This GPU as the planner's description."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": "cuda",
        "arch": 10 * properties.major + properties.minor,
        "sm_count": properties.multi_processor_count,
        "smem_per_block": properties.shared_memory_per_block_optin,
        "l2_bytes": properties.L2_cache_size,
    }


def test_decode_shapes_here_are_split():
    """Else the tests above would show nothing of partial results and their merge."""
    problem = {"pass": "forward", "dtype": "bfloat16", "batch": 3, "heads_q": 8, "heads_k": 2}
    problem |= {"head_dim": 64, "seqlen_q": 1, "seqlen_k": 2600}
    assert host.plan(problem | gpu())["num_splits"] > 1
    # Enough sequences fill the GPU without.
    assert host.plan(problem | gpu() | {"batch": 4096})["num_splits"] == 1


@pytest.mark.parametrize("page_size", [0, 16, 33, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_equals_cpu(page_size, dtype):
    """Sixteen sequences of a serving step, 0 to 4,000 keys, both devices' kernels."""
    batch, heads, heads_k, dim, capacity = 16, 8, 2, 128, 4224
    lengths = torch.randint(0, 4000, (batch,), dtype=torch.int32)
    lengths[3], lengths[5] = 0, 3999
    if page_size:
        per = -(-capacity // page_size)
        table = torch.randperm(batch * per).view(batch, per).int()
        shape = (batch * per, page_size, heads_k, dim)
    else:
        table, shape = None, (batch, capacity, heads_k, dim)
    q = torch.randn(batch, 2, heads, dim).to(dtype)
    k, v = (torch.randn(batch, 2, heads_k, dim).to(dtype) for _ in "kv")
    caches = [torch.randn(shape).to(dtype) for _ in "kv"]

    def run(device):
        mine = [x.to(device, copy=True) for x in caches]
        tensors = (x.to(device) for x in (q, k, v))
        first, *new = tensors
        out, lse = flash_attn_with_kvcache(
            first,
            *mine,
            *new,
            cache_seqlens=lengths.to(device),
            block_table=None if table is None else table.to(device),
            causal=True,
            return_softmax_lse=True,
        )
        return [x.cpu() for x in (out, lse, *mine)]

    (out, lse, *found), (out_cpu, lse_cpu, *expected) = run("cuda"), run("cpu")
    torch.testing.assert_close(out, out_cpu, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(lse, lse_cpu, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seqlen_q", [1, 2, 64, 65])
@pytest.mark.parametrize("num_splits", [0, 1, 2, 13, 128, 1000])
def test_decode_any_number_of_splits(seqlen_q, num_splits):
    """A hint, beyond what there are keys for too."""
    q = torch.randn(2, seqlen_q, 8, 64, device="cuda").bfloat16()
    caches = [torch.randn(2, 1500, 2, 64, device="cuda").bfloat16() for _ in "kv"]
    lengths = torch.tensor([1500, 3], dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    found = flash_attn_with_kvcache(q, *caches, num_splits=num_splits, **options)
    expected = flash_attn_with_kvcache(q, *caches, backend="reference", **options)
    torch.testing.assert_close(found[0], expected[0], rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-2)
    assert torch.equal(found[1] == float("-inf"), expected[1] == float("-inf"))


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("page", [0, 16])
def test_decode_nan_in_long_unused_slots(value, page):
    """Splits that hold no live key read nothing: the same bits with any filling."""
    lengths = torch.tensor([5, 1025, 0], dtype=torch.int32, device="cuda")
    q = torch.randn(3, 1, 8, 64, device="cuda").half()
    caches = [torch.randn(3, 4096, 2, 64, device="cuda").half() for _ in "kv"]
    table = torch.arange(3 * 4096 // page, device="cuda").view(3, -1).int() if page else None
    found = []
    for fill in (0.0, value):
        for cache in caches:
            for b, n in enumerate(lengths.tolist()):
                cache[b, n:] = fill
        views = [x.view(-1, page, 2, 64) for x in caches] if page else caches
        found.append(flash_attn_with_kvcache(q, *views, cache_seqlens=lengths, block_table=table))
    assert torch.equal(*found) and found[0].isfinite().all() and not found[0][2].any()


def test_decode_lengths_out_of_range_stay_in_bounds():
    """Negative lengths count as 0, too long ones as the capacity; pages that do not exist as no
    page. Nothing is known on the host, so nothing raises."""
    q = torch.randn(4, 1, 2, 64, device="cuda").bfloat16()
    caches = [torch.randn(4, 100, 2, 64, device="cuda").bfloat16() for _ in "kv"]
    lengths = torch.tensor([-7, 2**31 - 1, 100, 101], dtype=torch.int32, device="cuda")
    out = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
    exact = flash_attn_func(q, *caches)
    assert not out[0].any()
    torch.testing.assert_close(out[1:], exact[1:], rtol=2**-7, atol=2**-9)
    pages = [x.view(40, 10, 2, 64) for x in caches]
    table = torch.full((4, 10), 2**30, dtype=torch.int32, device="cuda")
    table[1:] = torch.arange(10, 40, device="cuda").view(3, 10)
    table[3, 9] = -5
    out = flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table)
    assert not out[0].any() and out.isfinite().all()
    torch.testing.assert_close(out[1:3], exact[1:3], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_decode_packed_queries_over_pages(page_size):
    """Varlen with a block table: prefill and decode rows in one call, long keys."""
    lens_q, lens_k = (1, 0, 130, 1), (2000, 50, 700, 0)
    rows, keys = sum(lens_q), sum(lens_k)
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        for x in (lens_q, lens_k)
    )
    q = torch.randn(rows, 8, 64, device="cuda").bfloat16()
    k, v = (torch.randn(keys, 2, 64, device="cuda").bfloat16() for _ in "kv")
    counts = [-(-n // page_size) for n in lens_k]
    table = torch.full((4, max(counts)), -1, dtype=torch.int32, device="cuda")
    caches = [
        torch.full((sum(counts), page_size, 2, 64), NAN, device="cuda").bfloat16() for _ in "kv"
    ]
    first = 0
    for b, n in enumerate(counts):
        table[b, :n] = torch.arange(first, first + n)
        begin = sum(lens_k[:b])
        for cache, x in zip(caches, (k, v), strict=True):
            flat = cache[first : first + n].flatten(0, 1)
            flat[: lens_k[b]] = x[begin : begin + lens_k[b]]
        first += n
    found = flash_attn_varlen_func(
        q, *caches, cu_q, cu_k, 130, 2000, causal=True, block_table=table
    )
    expected = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 2000, causal=True)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)
    assert found[:-1].any(-1).all() and not found[-1].any()
