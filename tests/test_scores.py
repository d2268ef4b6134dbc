# SPDX-License-Identifier: BSD-3-Clause
"""What changes a score before softmax: scale, softcap, ALiBi, additive bias, sinks; their order,
gradients."""

import cases
import pytest
import torch
from problem import Problem, check

import flash_attn

SHAPE = {"seqlen_q": 45, "seqlen_k": 70, "head_dim": 32}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("softcap", [0.5, 15.0])
def test_scores_softcap(softcap, dtype, device):
    check(cases.Case(**SHAPE, dtype=dtype, softcap=softcap, scale=1.0), device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("slopes", ["heads", "batch"])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_alibi(slopes, causal, dtype, device):
    check(cases.Case(**SHAPE, dtype=dtype, slopes=slopes, causal=causal), device)


@pytest.mark.parametrize("bias", ["full", "row", "column", "head", "one"])
@pytest.mark.parametrize(
    "dtype,bias_fp32", [("fp32", True), ("bf16", False), ("bf16", True), ("fp16", False)]
)
def test_scores_bias(bias, dtype, bias_fp32, device):
    check(cases.Case(**SHAPE, dtype=dtype, bias=bias, bias_fp32=bias_fp32), device)


@pytest.mark.parametrize(
    "dtype,bias_fp32", [("fp32", True), ("bf16", False), ("bf16", True), ("fp64", False)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_scores_sinks(dtype, bias_fp32, causal, device):
    check(
        cases.Case(
            seqlen_q=70,
            seqlen_k=45,
            head_dim=32,
            dtype=dtype,
            sinks=True,
            bias_fp32=bias_fp32,
            causal=causal,
            lse_grad=True,
        ),
        device,
    )


def test_scores_order(device):
    """Scale, then softcap, then ALiBi, then bias: against one row written out."""
    q = torch.full((1, 1, 1, 1), 3.0, device=device)
    k = torch.tensor([2.0, -1.0, 0.5], device=device).reshape(1, 3, 1, 1)
    bias = torch.tensor([0.3, -0.2, 5.0], device=device)
    s = 2.0 * torch.tanh(0.5 * 3.0 * k.flatten() / 2.0)
    s = s - 0.25 * torch.tensor([2.0, 1.0, 0.0], device=device) + bias
    out, lse = flash_attn.flash_attn_func(
        q,
        k,
        k,
        softmax_scale=0.5,
        softcap=2.0,
        alibi_slopes=torch.tensor([0.25], device=device),
        attn_bias=bias,
        return_lse=True,
    )
    torch.testing.assert_close(lse.flatten()[0], s.logsumexp(0))
    torch.testing.assert_close(out.flatten()[0], (s.softmax(0) * k.flatten()).sum())


def test_scores_sink_names(device):
    q = torch.randn(1, 5, 2, 8, device=device)
    sinks = torch.randn(2, device=device)
    a = flash_attn.flash_attn_func(q, q, q, learnable_sink=sinks)
    assert torch.equal(a, flash_attn.flash_attn_func(q, q, q, s_aux=sinks))
    with pytest.raises(ValueError, match="s_aux"):
        flash_attn.flash_attn_func(q, q, q, s_aux=sinks, learnable_sink=sinks)


def test_scores_sink_of_minus_infinity_is_none(device):
    problem = Problem(cases.Case(**SHAPE, causal=True), device)
    expected = problem.ours()
    problem.leaves["sinks"] = torch.full((4,), float("-inf"), device=device, requires_grad=True)
    found = problem.ours()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x)
    assert not found["dsinks"].any()


@pytest.mark.parametrize("seqlen_k", [43, 361])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_bias_odd_rows(seqlen_k, dtype, device):
    """Bias rows that are no multiple of 16 bytes."""
    check(
        cases.Case(seqlen_q=20, seqlen_k=seqlen_k, dtype=dtype, bias="head", contiguous=True),
        device,
    )


def test_scores_bias_strides(device):
    """An expanded and a transposed view of a bias."""
    q = torch.randn(2, 6, 3, 8, device=device)
    bias = torch.randn(3, 6, 6, device=device)
    expected = flash_attn.flash_attn_func(q, q, q, attn_bias=bias[None].repeat(2, 1, 1, 1))
    for view in (bias, bias[None], bias[None].expand(2, 3, 6, 6), bias.mT.contiguous().mT[None]):
        found = flash_attn.flash_attn_func(q, q, q, attn_bias=view)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_scores_bias_expanded_gradient(device):
    """The gradient of an expanded bias is the sum over its copies."""
    q = torch.randn(2, 6, 3, 8, device=device)
    bias = torch.randn(6, 6, device=device, requires_grad=True)
    dout = torch.randn(2, 6, 3, 8, device=device)
    (a,) = torch.autograd.grad(flash_attn.flash_attn_func(q, q, q, attn_bias=bias), bias, dout)
    wide = bias.expand(2, 3, 6, 6)
    (b,) = torch.autograd.grad(flash_attn.flash_attn_func(q, q, q, attn_bias=wide), bias, dout)
    torch.testing.assert_close(a, b)
