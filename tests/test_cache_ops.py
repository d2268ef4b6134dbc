# SPDX-License-Identifier: BSD-3-Clause
"""The operators around the cache alone: append_kv and rotary against plain torch, on each device.

On a GPU nobody has looked at lengths, tables and indices: what they name wrongly is neither read
nor written. Caches lie between guards, and are full of NaN.
"""

import pytest
import torch

from flash_attn import _ops as ops
from flash_attn import reference_cache

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def tables(device, positions, half, dtype):
    angles = torch.rand(positions, half, device=device) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def guarded(shape, dtype, device):
    """(whole storage, a cache of NaN in its middle)."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 64,), NAN, dtype=dtype, device=device)
    whole[:32] = whole[-32:] = 7.0
    return whole, whole[32:-32].view(shape)


def same(a, b):
    """Equal, NaN where NaN, to one rounding of a rotated element."""
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[a.dtype]
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def append(function, caches, arguments):
    whole, views = zip(*caches, strict=True)
    function(*views, *arguments)
    for storage in whole:
        assert (storage[:32] == 7).all() and (storage[-32:] == 7).all(), "wrote outside"
    return views


def check_append(device, dtype, shape, dim_v, arguments):
    """The operator and the reference from equal caches."""
    made = []
    for function in (lambda *a: ops.call(ops.append_kv, *a), reference_cache.append_kv):
        caches = [guarded((*shape, dim), dtype, device) for dim in (arguments[0].shape[-1], dim_v)]
        made.append(append(function, caches, arguments))
    for got, want in zip(*made, strict=True):
        same(got, want)


DIMS = [(1, 1), (5, 3), (40, 64), (64, 64), (128, 100), (192, 128)]


@dtypes
@pytest.mark.parametrize("where", ["own", "index", "page1", "page3", "page16"])
def test_append_kv(dtype, where, device):
    batch, new, heads = 3, 4, 2
    lengths, index, table = ints(device, 0, 9, 28), None, None
    shape = (batch, 32, heads)
    if where == "index":
        shape, index = (5, 32, heads), ints(device, 4, 0, 2)
    elif where.startswith("page"):
        page = int(where.removeprefix("page"))
        pages = -(-32 // page)
        order = torch.randperm(batch * pages, device=device).to(torch.int32)
        shape, table = (batch * pages, page, heads), order.view(batch, pages)
    for dim, dim_v in DIMS:
        k = torch.randn(batch, heads, new, dim, device=device).to(dtype).transpose(1, 2)
        v = torch.randn(batch, new, heads, dim_v, device=device).to(dtype)
        rest = lengths, index, table
        check_append(device, dtype, shape, dim_v, (k, v, None, None, *rest, False))
        for half in {max(1, dim // 4), dim // 2} if dim > 1 else ():
            angles = tables(device, 40, half, dtype)
            for interleaved in (False, True):
                check_append(device, dtype, shape, dim_v, (k, v, *angles, *rest, interleaved))


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotary"])
def test_append_kv_skips_what_does_not_exist(rotate, device):
    """-1 pages hold nothing, on every device."""
    k, v = torch.randn(2, 3, 4, 2, 16, device=device)
    table = torch.tensor([[0, -1, 2], [-1, -1, -1], [3, 1, -1]], dtype=torch.int32, device=device)
    cos, sin = tables(device, 12, 4, torch.float32) if rotate else (None, None)
    arguments = k, v, cos, sin, ints(device, 2, 0, 6), None, table, False
    check_append(device, torch.float32, (4, 4, 2), 16, arguments)


def on_gpu(device):
    if device == "cpu":
        pytest.skip("refused on the CPU, before anything is written")


@pytest.mark.parametrize("length", [-(2**31), -1, 30, 32, 2**31 - 1])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_append_kv_lengths_out_of_range(length, paged, device):
    """Slots that exist are written, no others."""
    on_gpu(device)
    k, v = torch.randn(2, 2, 4, 1, 8, device=device)
    shape, table = ((2, 32, 1), None)
    if paged:
        shape, table = (8, 8, 1), torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    caches = [guarded((*shape, 8), torch.float32, device) for _ in "kv"]
    lengths = ints(device, 3, length)
    views = append(
        lambda *a: ops.call(ops.append_kv, *a),
        caches,
        (k, v, None, None, lengths, None, table, False),
    )
    for view, new in zip(views, (k, v), strict=True):
        rows = view.reshape(2, 32, 1, 8)
        want = torch.full_like(rows, NAN)
        want[0, 3:7] = new[0]
        for i in range(4):
            if 0 <= length + i < 32:
                want[1, length + i] = new[1, i]
        same(rows, want)


def test_append_kv_entries_and_pages_out_of_range(device):
    on_gpu(device)
    k, v = torch.randn(2, 4, 1, 2, 8, device=device)
    caches = [guarded((3, 8, 2, 8), torch.float32, device) for _ in "kv"]
    index = ints(device, -1, 3, 1, 2**31 - 1)
    arguments = k, v, None, None, ints(device, 0, 0, 5, 0), index, None, False
    for view, new in zip(
        append(lambda *a: ops.call(ops.append_kv, *a), caches, arguments), (k, v), strict=True
    ):
        want = torch.full_like(view, NAN)
        want[1, 5] = new[2, 0]
        same(view, want)
    caches = [guarded((3, 8, 2, 8), torch.float32, device) for _ in "kv"]
    table = torch.tensor([[-7], [3], [2], [2**31 - 1]], dtype=torch.int32, device=device)
    arguments = k, v, None, None, ints(device, 0, 0, 5, 0), None, table, False
    for view, new in zip(
        append(lambda *a: ops.call(ops.append_kv, *a), caches, arguments), (k, v), strict=True
    ):
        want = torch.full_like(view, NAN)
        want[2, 5] = new[2, 0]
        same(view, want)


def test_append_kv_strided_caches(device):
    """A cache that is a view of a larger one, heads first, its rows not 16-byte aligned."""
    for dim in (1, 7, 64):
        arguments = [torch.randn(2, 3, 2, dim, device=device) for _ in "kv"]
        whole = [torch.full((2, 3, 2, 16, dim + 1), NAN, device=device) for _ in "kv"]
        views = [x[:, 1].transpose(1, 2)[..., :dim] for x in whole]
        want = [x.clone() for x in views]
        rest = *arguments, None, None, ints(device, 0, 12), None, None, False
        ops.call(ops.append_kv, *views, *rest)
        reference_cache.append_kv(*want, *rest)
        for storage, view, expected in zip(whole, views, want, strict=True):
            same(view, expected)
            view.fill_(NAN)
            assert storage.isnan().all()


@dtypes
@pytest.mark.parametrize("dim", [2, 7, 64, 100])
@pytest.mark.parametrize("per_row", [False, True], ids=["one", "rows"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary(dtype, dim, per_row, interleaved, device):
    x = torch.randn(2, 3, 5, dim, device=device).to(dtype).transpose(1, 2)
    for half in {1, dim // 2}:
        for table_dtype in {dtype, torch.float32}:
            cos, sin = tables(device, 20, half, table_dtype)
            arguments = x, cos, sin, ints(device, 0, 15), interleaved, per_row
            same(ops.call(ops.rotary, *arguments), reference_cache.rotary(*arguments))


def test_rotary_positions_out_of_range(device):
    """Rows at positions that the tables do not hold stay as they are."""
    on_gpu(device)
    x = torch.randn(5, 3, 2, 16, device=device)
    cos, sin = tables(device, 8, 8, torch.float32)
    offsets = ints(device, -(2**31), -1, 6, 8, 2**31 - 1)
    got = ops.call(ops.rotary, x, cos, sin, offsets, True, True)
    same(got[1, 1:], expected_rows(x[1, 1:], cos, sin, 0))
    same(got[2, :2], expected_rows(x[2, :2], cos, sin, 6))
    for b, rows in ((0, slice(None)), (1, slice(0, 1)), (2, slice(2, 3)), (3, slice(None))):
        assert torch.equal(got[b, rows], x[b, rows])
    assert torch.equal(got[4], x[4])


def expected_rows(rows, cos, sin, first):
    offsets = torch.tensor([first], dtype=torch.int32, device=rows.device)
    return reference_cache.rotary(rows[None], cos, sin, offsets, True, True)[0]


@pytest.mark.parametrize("shape", [(0, 2, 2, 8), (2, 0, 2, 8), (2, 2, 0, 8)], ids=str)
def test_cache_operators_of_nothing(shape, device):
    x = torch.randn(shape, device=device)
    cache = torch.full((shape[0], 4, *shape[2:]), NAN, device=device)
    cos, sin = tables(device, 4, 2, torch.float32)
    lengths = torch.zeros(shape[0], dtype=torch.int32, device=device)
    ops.call(ops.append_kv, cache, cache, x, x, cos, sin, lengths, None, None, False)
    assert ops.call(ops.rotary, x, cos, sin, lengths, False, True).shape == x.shape


def test_append_kv_in_a_cuda_graph(device):
    """Nothing synchronises; lengths that change between replays count."""
    on_gpu(device)
    k, v = torch.randn(2, 2, 1, 2, 64, device=device)
    caches = [torch.zeros(2, 16, 2, 64, device=device) for _ in "kv"]
    lengths = ints(device, 0, 3)
    arguments = *caches, k, v, None, None, lengths, None, None, False
    ops.call(ops.append_kv, *arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.call(ops.append_kv, *arguments)
    for step in range(1, 4):
        k.normal_()
        lengths += 1
        graph.replay()
        assert torch.equal(caches[0][0, step], k[0, 0])
        assert torch.equal(caches[0][1, 3 + step], k[1, 0])
