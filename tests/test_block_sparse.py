# SPDX-License-Identifier: BSD-3-Clause
"""BlockMask: lists against their dense form, parity of kernels that walk them, and what they
cost. The patterns that make one: test_block_patterns.py."""

import cases
import pytest
import torch
from problem import Problem, check

import flash_attn
from flash_attn import BlockMask


@pytest.mark.parametrize("size", [(16, 16), (64, 128), (1, 1), (128, 64), (48, 20), (7, 3)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_block_sparse_sizes(size, dtype, device):
    check(cases.Case(seqlen_q=150, seqlen_k=200, dtype=dtype, blocks=size, heads=2), device)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_block_sparse_with_masks(packed, causal, device):
    check(
        cases.Case(
            seqlen_q=100,
            seqlen_k=140,
            blocks=(32, 32),
            packed=packed,
            causal=causal,
            window=(60, -1),
            lse_grad=True,
        ),
        device,
    )


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_block_sparse_broadcast(shape, device):
    """One list for all batches or heads."""
    q = torch.randn(2, 40, 4, 16, device=device)
    blocks = torch.rand(*shape, 5, 5, device=device) < 0.5
    found = flash_attn.flash_attn_func(q, q, q, block_mask=BlockMask.from_dense(blocks, 8))
    mask = blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)
    torch.testing.assert_close(found, flash_attn.flash_attn_func(q, q, q, attn_bias=mask))


def test_block_sparse_indices_equal_dense(device):
    blocks = torch.rand(2, 3, 6, 7, device=device) < 0.4
    blocks[0, 0, 2] = False
    dense = BlockMask.from_dense(blocks, (16, 8))
    counts = blocks.sum(-1)
    width = int(counts.max()) + 2
    lists = torch.full((2, 3, 6, width), -1, dtype=torch.int64, device=device)
    for place in (counts > 0).nonzero().tolist():
        b, h, row = place
        found = blocks[b, h, row].nonzero().flatten().flip(0)  # any order
        lists[b, h, row, : len(found)] = found
    listed = BlockMask.from_indices(counts, lists, (16, 8), columns=7)
    assert torch.equal(dense.to_dense(), blocks) and torch.equal(listed.to_dense(), blocks)
    assert abs(dense.density - blocks.float().mean().item()) < 1e-6
    q = torch.randn(2, 96, 3, 8, device=device)
    k = torch.randn(2, 56, 3, 8, device=device)
    a = flash_attn.flash_attn_func(q, k, k, block_mask=dense)
    assert torch.equal(a, flash_attn.flash_attn_func(q, k, k, block_mask=listed))


def test_block_sparse_all_and_none(device):
    problem = Problem(cases.Case(seqlen_q=100, seqlen_k=70), device)
    q, k, v = (problem.leaves[name] for name in "qkv")
    everything = BlockMask.from_dense(torch.ones(4, 3, dtype=torch.bool, device=device), (32, 32))
    torch.testing.assert_close(
        flash_attn.flash_attn_func(q, k, v, block_mask=everything), problem.call()
    )
    nothing = BlockMask.from_dense(torch.zeros(4, 3, dtype=torch.bool, device=device), (32, 32))
    out, lse = flash_attn.flash_attn_func(q, k, v, block_mask=nothing, return_lse=True)
    assert not out.any() and (lse == float("-inf")).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(grad.any() for grad in grads)


def test_block_sparse_hidden_blocks_are_not_read(device):
    """NaN in keys of blocks that no row lists cannot matter: those tiles are never loaded."""
    q, k, v = (torch.randn(1, 128, 2, 16, device=device) for _ in range(3))
    blocks = torch.ones(2, 2, dtype=torch.bool, device=device)
    blocks[:, 1] = False
    mask = BlockMask.from_dense(blocks, 64)
    expected = flash_attn.flash_attn_func(q, k, v, block_mask=mask)
    k[:, 64:], v[:, 64:] = float("nan"), float("inf")
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, block_mask=mask), expected)


def test_block_sparse_varlen_ignores_blocks_past_the_end(device):
    """A mask made for longer sequences: spare rows and columns are ignored in packed calls."""
    cu = torch.tensor([0, 20, 25], dtype=torch.int32, device=device)
    q = torch.randn(25, 2, 16, device=device)
    blocks = torch.rand(1, 1, 8, 8, device=device) < 0.6
    wide = BlockMask.from_dense(blocks, 8)
    narrow = BlockMask.from_dense(blocks[:, :, :3, :3], 8)
    a = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 20, 20, block_mask=wide)
    b = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 20, 20, block_mask=narrow)
    assert torch.equal(a, b)


def test_block_mask_reads():
    mask = BlockMask.from_dense(torch.tensor([[True, False], [True, True]]), (64, 32))
    assert mask.block_size == (64, 32) and mask.density == 0.75
    assert mask.to("cpu").to_dense().shape == (1, 1, 2, 2)
    assert "density" in repr(mask)


def test_block_sparse_gradient_lists(device):
    """Frozen mask, GQA: the transposed lists give dk and dv of columns that only some heads
    see."""
    check(cases.Case(seqlen_q=64, seqlen_k=64, blocks=(16, 32), heads=6, heads_k=2), device)
