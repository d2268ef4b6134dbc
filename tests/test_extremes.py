# SPDX-License-Identifier: BSD-3-Clause
"""Values at the edge of what a dtype holds: exact small answers, worked out by hand."""

import pytest
import torch
from problem import assert_copies

from flash_attn import flash_attn_func

INF = float("inf")


def tensor(values, device, dtype=torch.float32):
    """(1, n, 1, 1), with a gradient."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(1, -1, 1, 1).requires_grad_()


def attend(q, k, v, dout, **kwargs):
    """out and the gradients of q, k, v as lists."""
    out = flash_attn_func(q, k, v, **kwargs)
    out.backward(torch.tensor(dout, dtype=out.dtype, device=out.device).reshape(out.shape))
    return [x.flatten().tolist() for x in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("level", ["min", -1e9, -1e8, -1e6, 1e6, 1e30])
def test_row_of_one_huge_bias_is_uniform(level, dtype, device):
    """A finite bias hides nothing, however low: the usual additive mask over a whole row."""
    level = torch.finfo(dtype).min if level == "min" else level
    bias = torch.full((1, 1, 1, 2), level, dtype=dtype, device=device)
    q, k, v = (tensor(x, device, dtype) for x in ([0.0], [1.0, 3.0], [1.0, 3.0]))
    out, dq, dk, dv = attend(q, k, v, [1.0], attn_bias=bias)
    assert (out, dq, dk, dv) == ([2.0], [1.0], [0.0, 0.0], [0.5, 0.5])


@pytest.mark.parametrize("seqlen_k", [2, 300])
def test_huge_equal_scores_keep_their_weights_in_the_backward_pass(seqlen_k, device):
    q, k = tensor([1e7], device), tensor([1.0] * seqlen_k, device)
    v = tensor([float(j) for j in range(seqlen_k)], device)
    out, _, _, dv = attend(q, k, v, [1.0], softmax_scale=1.0)
    assert out[0] == pytest.approx((seqlen_k - 1) / 2, rel=1e-6)
    assert dv == pytest.approx([1 / seqlen_k] * seqlen_k, rel=1e-6)


@pytest.mark.parametrize("bias", [[True, False], [0.0, -INF]])
def test_hidden_key_with_an_overflowing_score(bias, device):
    q, k, v = (tensor(x, device) for x in ([1e20], [1e-20, 1e20], [1.0, 2.0]))
    bias = torch.tensor(bias, device=device).reshape(1, 1, 1, 2)
    out, lse = flash_attn_func(q, k, v, attn_bias=bias, return_lse=True)
    # The product of 1e20 and 1e-20, as fp32 holds them, is 0.999999989: between two numbers.
    assert out.item() == 1.0 and lse.item() in (1.0, 1 - 2**-24)


@pytest.mark.parametrize(
    "mask",
    [
        {"causal": True},
        {"window_size": (0, 0)},
        {"attn_bias": torch.tensor([[True, False], [True, True]]).reshape(1, 1, 2, 2)},
    ],
    ids=["causal", "window", "boolean"],
)
def test_hidden_value_that_overflows_in_the_backward_pass(mask, device):
    mask = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in mask.items()}
    q, k, v = (tensor(x, device) for x in ([1.0, 1.0], [1.0, 1.0], [1.0, 3e38]))
    _, dq, dk, dv = attend(q, k, v, [10.0, 0.0], **mask)
    assert (dq[0], dk, dv[0]) == (0.0, [0.0, 0.0], 10.0)


@pytest.mark.parametrize("poison", [INF, float("nan")])
def test_row_without_keys_ignores_its_gradient(poison, device):
    q, k, v = (tensor(x, device) for x in ([1.0, 1.0, 1.0], [1.0], [1.0]))
    _, dq, dk, dv = attend(q, k, v, [poison, poison, 1.0], causal=True)
    assert (dq, dk, dv) == ([0.0, 0.0, 0.0], [0.0], [1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_key_copies_to_the_bit(dtype, device):
    """One visible key has weight exactly 1, forward and backward."""
    torch.manual_seed(0)
    q, k, v, dout = ((torch.randn(2, 33, 2, 24, device=device) * 3).to(dtype) for _ in range(4))
    v.requires_grad_()
    out = flash_attn_func(q, k, v, window_size=(0, 0))
    out.backward(dout)
    assert_copies(out, v)
    assert_copies(v.grad, dout)
