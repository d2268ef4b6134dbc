# SPDX-License-Identifier: BSD-3-Clause
"""What the Hopper kernels' copy engine reads by boxes: pages of any size, missing ones, heads and
batches that repeat, mask blocks smaller than a tile; and few rows. Forced by backend="sm90"."""

import cases
import pytest
import torch
from problem import check, poison
from test_kvcache import NAN, Decode, check_decode

import flash_attn
from flash_attn import _host as host
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def hopper_missing():
    """Why these tests cannot run, or ''."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "no Hopper GPU"
    if host.cuda_code() < 90 or not any(row["family"] == "sm90" for row in host.rows()):
        return "this build has no Hopper kernels"
    return ""


pytestmark = pytest.mark.skipif(bool(hopper_missing()), reason=hopper_missing() or "-")

ONE = {"capacity": 700, "dtype": "bf16", "dim": 64, "dim_v": 64, "new": 1, "seqlen_q": 1}
MANY = ONE | {"seqlen_q": 70, "new": 70}
WIDE = {"dim": 128, "dim_v": 128}
DECODE = [
    Decode((600, 0, 1), heads=8, **ONE),
    Decode((600, 129), heads=16, heads_k=1, **ONE | WIDE),
    Decode((600, 64), leftpad=(500, 5), sinks=True, **ONE),
    Decode((600, 200), leftpad=(601, 201), sinks=True, **ONE),
    Decode((600, 200), batch_idx=(3, 1), rotary=32, **MANY),
    Decode((600, 200), softcap=5.0, slopes=True, **ONE),
    Decode((600, 200), blocks=True, **ONE),
    Decode((600, 200), causal=False, window=(100, 30), **MANY | WIDE),
    Decode((600, 200), **ONE | {"dim": 256, "dim_v": 256}),
    Decode((600, 200), **ONE | {"dim": 37, "dim_v": 80}),
]
PAGED = [
    Decode((600, 0, 130), page_size=size, **more)
    for size, more in [
        (1, ONE),
        (1, MANY | {"leftpad": (130, 0, 3)}),
        (2, MANY | WIDE | {"dtype": "fp16"}),
        (7, ONE | WIDE),
        (8, MANY | {"window": (200, 0)}),
        (16, MANY | WIDE | {"sinks": True}),
        (16, ONE | {"heads": 8}),
        (17, MANY | {"dim": 256, "dim_v": 256}),
        (24, MANY | {"slopes": True, "causal": False}),
        (48, ONE | {"softcap": 3.0}),
        (64, MANY | WIDE),
        (64, MANY | {"dim": 192, "dim_v": 128}),
        (96, MANY | {"blocks": True}),
        (100, MANY | WIDE | {"causal": False, "window": (150, 20)}),
        (128, ONE | {"dim": 256, "dim_v": 192}),
        (256, MANY | {"leftpad": (600, 0, 3)}),
        (1000, MANY | WIDE | {"capacity": 1000, "rotary": 16}),
    ]
]


@pytest.mark.parametrize("case", DECODE + PAGED, ids=lambda case: case.id)
def test_boxes_decode(case):
    check_decode(Decode(**vars(case) | {"aligned": True}), "cuda", backend="sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [4, 16, 128])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_boxes_missing_pages(page_size, head_dim, softcap):
    """Pages that are -1, or do not exist, in the middle of a sequence: their keys are hidden."""
    q = torch.randn(2, 150, 4, head_dim).bfloat16()
    count = -(-700 // page_size)
    caches = [torch.randn(2 * count, page_size, 2, head_dim).bfloat16() for _ in "kv"]
    table = torch.randperm(2 * count).view(2, count).int()
    missing = torch.rand(2, count) < 0.2
    table[missing] = -1
    options = {"causal": True, "softcap": softcap, "return_softmax_lse": True}
    lengths = torch.tensor([700, 500], dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=table, backend="cpu", **options
    )
    for cache in caches:  # what no live slot shows
        used = torch.zeros(2 * count, dtype=torch.bool)
        used[table[table >= 0].long()] = True
        cache[~used] = NAN
    table[missing] = torch.where(torch.rand(int(missing.sum())) < 0.5, -1, 2**30).int()
    found, found_lse = flash_attn_with_kvcache(
        *(x.cuda() for x in (q, *caches)),
        cache_seqlens=lengths.cuda(),
        block_table=table.cuda(),
        backend="sm90",
        **options,
    )
    torch.testing.assert_close(found.cpu(), out, rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(found_lse.cpu(), lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_boxes_packed_over_pages(page_size):
    """Varlen with a block table: prefill and decode rows in one call."""
    cu_q = torch.tensor([0, 1, 1, 131, 132], dtype=torch.int32, device="cuda")
    used = torch.tensor([600, 50, 300, 0], dtype=torch.int32, device="cuda")
    count = -(-600 // page_size)
    q = torch.randn(132, 8, 128, device="cuda").bfloat16()
    table = torch.randperm(4 * count, device="cuda").view(4, count).int()
    caches = [torch.randn(4 * count, page_size, 2, 128, device="cuda").bfloat16() for _ in "kv"]
    cu_k = torch.arange(5, dtype=torch.int32, device="cuda") * 600
    flat = [cache[table.long()].flatten(1, 2)[:, :600].flatten(0, 1) for cache in caches]
    args = (cu_q, cu_k, 130, 600)
    options = {"causal": True, "seqused_k": used, "backend": "sm90"}
    found = flash_attn_varlen_func(q, *caches, *args, block_table=table, **options)
    expected = flash_attn_varlen_func(q, *flat, *args, **options)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)
    assert found[:-1].any(-1).all() and not found[-1].any()


@pytest.mark.parametrize("heads_k", [1, 4])
@pytest.mark.parametrize("repeated", ["heads", "batches", "both"])
def test_boxes_repeats(repeated, heads_k):
    """Keys that torch expands over heads or batches are read where they are: the same bits."""
    q = torch.randn(3, 100, 4, 64, device="cuda").half()
    shape = [1 if repeated != "heads" else 3, 300, 1 if repeated != "batches" else heads_k, 64]
    k, v = (torch.randn(shape, device="cuda").half().expand(3, 300, heads_k, 64) for _ in "kv")
    found = flash_attn_func(q, k, v, causal=True, backend="sm90")
    expected = flash_attn_func(q, k.contiguous(), v.contiguous(), causal=True, backend="sm90")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", ["odd start", "odd rows", "one row"])
def test_boxes_refused(wrong):
    """Rows that do not begin at multiples of 16 bytes, and one row for all keys, cannot be had."""
    q = torch.randn(1, 100, 2, 64, device="cuda").half()
    k = {
        "odd start": lambda: poison(q),
        "odd rows": lambda: torch.randn(1, 100, 2, 67, device="cuda").half()[..., :64],
        "one row": lambda: q[:, :1].expand(1, 100, 2, 64),
    }[wrong]()
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
        flash_attn_func(q, k, q, backend="sm90")
    assert "multiples of 16 bytes" in str(flash_attn.explain(q, k, q))


FEW = {"heads": 4, "heads_k": 2, "aligned": True}
CASES = [
    cases.Case(2, rows, keys, head_dim=dim, dtype=dtype, **FEW, **more)
    for rows, keys, dim, dtype, more in [
        (1, 300, 64, "bf16", {}),
        (1, 2000, 128, "fp16", {"causal": True}),
        (3, 129, 256, "bf16", {"softcap": 3.0}),
        (17, 1000, 128, "bf16", {"causal": True, "dropout": 0.2}),
        (63, 70, 64, "fp16", {"window": (20, 3), "slopes": "batch"}),
        (5, 3, 64, "bf16", {"causal": True, "sinks": True}),
        (70, 0, 64, "bf16", {"sinks": True}),
    ]
] + [
    cases.Case(2, 200, 333, blocks=size, head_dim=dim, dtype="bf16", **FEW, **more)
    for size, dim, more in [
        ((64, 64), 64, {}),
        ((64, 64), 128, {"bits": True, "causal": True}),
        ((128, 32), 128, {"dropout": 0.2}),
        ((16, 16), 64, {"bits": True}),
        ((1, 1), 64, {}),
        ((7, 100), 128, {"softcap": 3.0}),
        ((100, 7), 256, {"bits": True, "window": (60, 0)}),
        ((192, 192), 64, {"bits": True}),
        ((48, 96), 128, {"packed": True, "slopes": "heads"}),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_boxes_shapes(case):
    check(case, "cuda", backend="sm90", gradients=False)
