# SPDX-License-Identifier: BSD-3-Clause
"""lse: its meaning, its gradient, and merging partial results with it."""

import math

import cases
import pytest
import torch
from problem import check

import flash_attn


def merge(parts):
    """Plain-torch merge of (out, lse) pairs over disjoint keys."""
    lses = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lses, 0)
    safe = torch.where(total == float("-inf"), 0.0, total)
    out = sum(out * (lse - safe).exp().transpose(1, 2)[..., None] for out, lse in parts)
    return out, total


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("packed", [False, True])
def test_lse_gradient(dtype, packed, device):
    check(
        cases.Case(
            seqlen_q=50,
            seqlen_k=40,
            dtype=dtype,
            packed=packed,
            causal=True,
            lse_grad=True,
            sinks=True,
        ),
        device,
    )


def test_lse_is_natural_logarithm(device):
    """Equal scores of 0 over n keys: log n; a sink adds its own exponential."""
    q = torch.zeros(1, 4, 1, 8, device=device)
    k = torch.zeros(1, 7, 1, 8, device=device)
    _, lse = flash_attn.flash_attn_func(q, k, k, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(7)))
    sink = torch.tensor([1.5], device=device)
    _, lse = flash_attn.flash_attn_func(q, k, k, learnable_sink=sink, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(7 + math.exp(1.5))))


def test_lse_is_fp32_in_low_precision(device):
    """Not rounded to bf16: 5,000 equal keys of score 0 give log(5000) to fp32."""
    q = torch.zeros(1, 1, 1, 8, device=device, dtype=torch.bfloat16)
    k = torch.zeros(1, 5000, 1, 8, device=device, dtype=torch.bfloat16)
    _, lse = flash_attn.flash_attn_func(q, k, k, return_lse=True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.item(), math.log(5000), rtol=0, atol=2e-6)


def test_lse_merge_of_key_slices(device):
    q, k, v = (torch.randn(2, n, 4, 16, device=device) for n in (30, 90, 90))
    whole = flash_attn.flash_attn_func(q, k, v, return_lse=True)
    parts = [
        flash_attn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in [(0, 0), (0, 33), (33, 34), (34, 90)]
    ]
    out, lse = merge(parts)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])


def test_lse_gradient_through_a_merge(device):
    """Training through a merge (ring attention) equals training through one call."""
    q, k, v = (torch.randn(1, n, 2, 16, device=device, requires_grad=True) for n in (12, 40, 40))
    dout = torch.randn(1, 12, 2, 16, device=device)
    expected = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v), (q, k, v), dout)
    parts = [
        flash_attn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in [(0, 15), (15, 40)]
    ]
    found = torch.autograd.grad(merge(parts)[0], (q, k, v), dout)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_lse_extreme_values(device):
    """Scores near ±2.5e5 and ±1e-30: lse is finite and right."""
    q = torch.tensor([448.0, -448.0, 1e-30], device=device).reshape(1, 3, 1, 1)
    k = torch.tensor([547.0, 546.0], device=device).reshape(1, 2, 1, 1)
    _, lse = flash_attn.flash_attn_func(q, k, k, return_lse=True)
    exact = torch.logsumexp(q.double().flatten()[:, None] * k.double().flatten(), 1)
    torch.testing.assert_close(lse.flatten().double(), exact, rtol=1e-6, atol=1e-6)
