# SPDX-License-Identifier: BSD-3-Clause
"""Pairs of features and pairs of lengths on a GPU against the fp64 oracle, gradients included:
every head_dim bucket, both kinds of score kernel, tile edges, splits, and the edges of what the
kernels take. On the CPU the lists of cases.py that come before these do."""

import cases
import pytest
import torch
from conftest import needs_cuda
from problem import BACKWARD_HEAD_DIM, check, has_backward

import flash_attn

pytestmark = needs_cuda

EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("case", cases.PAIRS, ids=cases.ids)
def test_pairs(case):
    check(case, "cuda")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seqlen_q", EDGES)
def test_pairs_of_lengths(seqlen_q, packed):
    """Every edge beside every other; dtype, mask and head_dim go round."""
    for index, seqlen_k in enumerate(EDGES, EDGES.index(seqlen_q)):
        case = cases.Case(
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads=4,
            heads_k=2 + 2 * (index % 2),
            head_dim=(64, 128, 40)[index % 3],
            dtype=("bf16", "fp16")[index % 2],
            packed=packed,
            causal=index % 4 < 2,
            window=(64, -1) if index % 5 == 0 else (-1, -1),
        )
        check(case, "cuda")


@pytest.mark.parametrize("group", [1, 2, 5, 8, 16, 71])
def test_pairs_group_sizes(group):
    """Query heads that share a key head, few queries (packed into a tile) and many."""
    for seqlen_q in (1, 3, 70):
        heads_k = 1 if group == 71 else 2
        case = cases.Case(
            4, seqlen_q, 300, group * heads_k, heads_k, 64, dtype="bf16", causal=True, lse_grad=True
        )
        check(case, "cuda")


@pytest.mark.parametrize("scale", [-1.0, 0.0, -1e-6, 1e-6, 30.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_pairs_scales(scale, dtype):
    """A negative scale turns the order of scores round, 0 makes them equal: with a row maximum
    taken before scaling both would be wrong."""
    case = cases.Case(1, 130, 200, 2, 1, 64, dtype=dtype, scale=scale, causal=True, lse_grad=True)
    check(case, "cuda")


@pytest.mark.parametrize("dim", [*range(1, 20), 23, 31, 46, 59, 100, 127, 129, 191, 255])
def test_pairs_head_dims(dim):
    """No head_dim is special: odd ones take loads of one element, and padding stays unseen."""
    case = cases.Case(1, 70, 90, 2, 2, dim, 1 + dim % 61, dtype=("bf16", "fp16")[dim % 2])
    check(case, "cuda")
    check(cases.replace(case, contiguous=True, causal=True), "cuda")


def test_pairs_refused():
    """What no kernel takes says so, with the limit; nothing falls back silently."""
    q = torch.zeros(1, 4, 2, 64, device="cuda", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        flash_attn.flash_attn_func(q, q, q)
    q = torch.zeros(1, 4, 2, 1030, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="1030"):
        flash_attn.flash_attn_func(q, q, q)
    half = torch.zeros(1, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="device"):
        flash_attn.flash_attn_func(half, half.cpu(), half)
    with pytest.raises(NotImplementedError, match="sm90|cpu|GPU"):
        flash_attn.flash_attn_func(half, half, half, backend="cpu")


def test_pairs_backward_limit():
    """Beyond the largest backward kernel the forward runs, and a gradient is refused by name."""
    dim = 512
    if has_backward("cuda", dim):
        pytest.skip(f"this build has gradients at head_dim {dim}")
    assert dim > BACKWARD_HEAD_DIM
    q = torch.randn(1, 4, 2, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="head_dim"):
        flash_attn.flash_attn_func(q, q, q).sum().backward()
