# SPDX-License-Identifier: BSD-3-Clause
"""Hopper's forward blocks stay and do one task after another: more tasks than multiprocessors, of
different lengths and none; queries that the copy engine can't fetch; replayed graphs."""

import cases
import pytest
import torch
from conftest import needs_cuda
from problem import check

from flash_attn import flash_attn_func, flash_attn_varlen_func

if needs_cuda.args[0] is False and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip(
        "needs a GPU of compute capability 9.x, for whose own kernels these are",
        allow_module_level=True,
    )
pytestmark = needs_cuda


def attend(case):
    check(case, "cuda", "sm90", gradients=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_more_tasks_than_multiprocessors(causal, head_dim, dtype):
    attend(cases.Case(8, 330, 330, 16, 4, head_dim, dtype=dtype, causal=causal, aligned=True))


@pytest.mark.parametrize(
    "options",
    [
        {"packed": True, "causal": True},
        {"packed": True},
        {"window": (50, 20)},
        {"causal": True, "softcap": 4.0, "sinks": True},
        {"causal": True, "dropout": 0.2},
        {"blocks": (64, 128)},
        {"blocks": (64, 128), "bits": True, "causal": True},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("sizes", [(300, 300), (330, 150), (100, 500)])
def test_tasks_of_every_length(sizes, options):
    attend(cases.Case(20, *sizes, 8, 4, 64, dtype="bf16", aligned=True, **options))


@pytest.mark.parametrize("mask", [{}, {"bits": True}, {"bits": True, "causal": True}], ids=str)
@pytest.mark.parametrize("blocks", [(128, 128), (64, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tasks_of_block_lists(head_dim, blocks, mask):
    attend(
        cases.Case(9, 700, 500, 8, 4, head_dim, dtype="bf16", blocks=blocks, aligned=True, **mask)
    )


@pytest.mark.parametrize("window", [(0, 0), (70, 0), (100, 30), (5, 300)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_with_a_left_side(head_dim, window):
    """Tiles of 64 keys: of some a warpgroup sees nothing, at either end of its walk."""
    for sizes in ((700, 700), (300, 650), (650, 300)):
        attend(cases.Case(6, *sizes, 8, 2, head_dim, dtype="fp16", window=window, aligned=True))


@pytest.mark.parametrize("heads", [(12, 2), (6, 2), (8, 1), (14, 2), (32, 1)])
@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_query_heads_share_tiles(head_dim, heads):
    attend(cases.Case(5, 70, 400, *heads, head_dim, dtype="bf16", causal=True, aligned=True))


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128])
@pytest.mark.parametrize("shift", [0, 1])
def test_queries_of_any_layout(shift, head_dim):
    """Unaligned rows, heads that repeat, an odd head_dim_v: no boxes, no chunks of 16 bytes."""
    wide = torch.randn(40, 200, 8, head_dim + 3, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(40, 200, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(40, 200, 8, 48, device="cuda", dtype=torch.bfloat16)[..., :43]
    for q in (wide[..., shift : shift + head_dim], wide[:, :, :1, :head_dim].expand(-1, -1, 8, -1)):
        found = flash_attn_func(q, k, v, causal=True, backend="sm90")
        expected = flash_attn_func(q.contiguous(), k, v.contiguous(), causal=True, backend="sm80")
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graph_replays_count_tasks_anew(head_dim):
    """The counter of tasks lies in scratch that the graph clears itself."""
    lengths = torch.randint(0, 400, (60,), device="cuda")
    cu = torch.zeros(61, dtype=torch.int32, device="cuda")
    cu[1:] = lengths.cumsum(0)
    total = int(cu[-1])
    q, k, v = (
        torch.randn(total, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )

    def run():
        return flash_attn_varlen_func(q, k, v, cu, cu, causal=True, backend="sm90")

    expected = run()
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
