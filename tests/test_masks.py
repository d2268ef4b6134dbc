# SPDX-License-Identifier: BSD-3-Clause
"""Causal, windows, boolean masks: exhaustively on small lengths, with one-hot values that show
each weight."""

import itertools

import cases
import oracle
import pytest
import torch
from problem import check

import flash_attn


def weights(seqlen_q, seqlen_k, device="cpu", **mask):
    """Which keys each query sees, read off equal weights over one-hot values: (seqlen_q,
    seqlen_k) bool."""
    q = torch.zeros(1, seqlen_q, 1, 4, device=device)
    k = torch.zeros(1, seqlen_k, 1, 4, device=device)
    v = torch.eye(seqlen_k, device=device)[None, :, None]
    return flash_attn.flash_attn_func(q, k, v, **mask)[0, :, 0]


@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 8])
@pytest.mark.parametrize("seqlen_k", [1, 3, 5, 9])
def test_masks_every_window(seqlen_q, seqlen_k, device):
    for left, right in itertools.product(range(-1, 7), repeat=2):
        seen = oracle.visible(oracle.Rule(1.0, (left, right)), seqlen_q, seqlen_k, device)[0, 0]
        expected = seen / seen.sum(1, keepdim=True).clamp(min=1)
        found = weights(seqlen_q, seqlen_k, device, window_size=(left, right))
        torch.testing.assert_close(found, expected, msg=f"window {left}, {right}")
        causal = weights(seqlen_q, seqlen_k, device, window_size=(left, right), causal=True)
        assert torch.equal(causal, weights(seqlen_q, seqlen_k, device, window_size=(left, 0)))


@pytest.mark.parametrize(
    "lengths", [(150, 190), (190, 150), (64, 64), (1, 200), (200, 1), (129, 129)]
)
@pytest.mark.parametrize(
    "window", [(-1, 0), (0, 0), (70, 3), (1, 130), (-1, 64), (64, -1), (300, 300)]
)
def test_masks_window_over_tiles(lengths, window, device):
    """Windows that begin and end inside, at and past tile borders."""
    seen = oracle.visible(oracle.Rule(1.0, window), *lengths, device)[0, 0]
    expected = seen / seen.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(weights(*lengths, device, window_size=window), expected)


def test_masks_docstring_pictures(device):
    """The pictures of the docstring: 2 x 5 and 5 x 2."""
    wide = weights(2, 5, device, causal=True) > 0
    assert wide.tolist() == [[True] * 4 + [False], [True] * 5]
    tall = weights(5, 2, device, causal=True) > 0
    assert tall.tolist() == [[False] * 2] * 3 + [[True, False], [True, True]]


@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 30, 50),
        (1, 4, 30, 50),
        (2, 1, 30, 50),
        (1, 1, 30, 50),
        (2, 1, 1, 50),
        (30, 50),
        (50,),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_masks_boolean_shapes(shape, dtype, device):
    """A boolean mask of every broadcast shape equals -inf in an additive bias."""
    dtype = cases.DTYPES[dtype]
    q = torch.randn(2, 30, 4, 16, device=device).to(dtype)
    k = torch.randn(2, 50, 4, 16, device=device).to(dtype)
    mask = torch.rand(shape, device=device) < 0.6
    mask[..., 0] = False
    bias = torch.zeros(shape, device=device).masked_fill(~mask, float("-inf"))
    out, lse = flash_attn.flash_attn_func(q, k, k, attn_bias=mask, return_lse=True)
    out2, lse2 = flash_attn.flash_attn_func(q, k, k, attn_bias=bias, return_lse=True)
    torch.testing.assert_close(out, out2)
    torch.testing.assert_close(lse, lse2)
    expected = flash_attn.flash_attn_func(q, k, k, attn_bias=mask, backend="reference")
    near = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-8}
    torch.testing.assert_close(out, expected, **near)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_masks_combine_by_and(dtype, device):
    check(
        cases.Case(
            seqlen_q=70, seqlen_k=90, dtype=dtype, bias="mask", window=(40, 9), blocks=(16, 16)
        ),
        device,
    )


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_masks_hidden_finite_values_do_nothing(kind, device):
    """Huge finite keys and values where nothing sees them; NaN only past the sequence
    (test_varlen)."""
    q, k, v = (torch.randn(1, 40, 2, 16, device=device) for _ in range(3))
    k2, v2 = k.clone(), v.clone()
    k2[:, 20:], v2[:, 20:] = (1e18, -1e18) if kind == "inf" else (-3e4, 7e4)
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(-1, -1), causal=True)[:, :20]
    assert torch.equal(flash_attn.flash_attn_func(q, k2, v2, causal=True)[:, :20], expected)


def test_masks_empty_rows_gradients(device):
    """Rows that see nothing: out 0, lse -inf, gradients exactly 0."""
    q, k, v = (torch.randn(2, n, 2, 8, device=device, requires_grad=True) for n in (20, 12, 12))
    mask = torch.ones(1, 1, 20, 12, dtype=torch.bool, device=device)
    mask[:, :, [0, 7, 19]] = False
    out, lse = flash_attn.flash_attn_func(q, k, v, attn_bias=mask, return_lse=True)
    (out.sum() + lse.masked_fill(lse == float("-inf"), 0).sum()).backward()
    for row in (0, 7, 19):
        assert not out[:, row].any() and not q.grad[:, row].any()
        assert (lse[:, :, row] == float("-inf")).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
