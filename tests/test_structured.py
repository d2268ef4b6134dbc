# SPDX-License-Identifier: BSD-3-Clause
"""Values and lengths that random normal numbers never show, forward and backward: one dominant
channel, equal scores, one-hot rows, alternating signs, scores of hundreds of thousands. Each kind
also under masks, packed, with few queries, and on lengths that leave a tail in the last tile."""

import math

import cases
import pytest
import torch
from problem import Problem, check

import flash_attn

SHAPES = {
    "tail": cases.Case(1, 65, 129, 2, 1, 64, causal=True),
    "long": cases.Case(1, 33, 257, 4, 1, 128),
    "packed": cases.Case(packed=True, seqlen_q=70, seqlen_k=97, head_dim=40, causal=True),
    "window": cases.Case(1, 200, 200, 2, 2, 64, window=(33, 5)),
    "blocks": cases.Case(1, 130, 200, 2, 2, 64, blocks=(64, 64)),
    "decode": cases.Case(2, 1, 513, 8, 2, 64),
}


def fill(problem, kind):
    """Overwrites q, k and v in place. Whatever stands outside their live rows stays NaN."""
    q, k, v = (problem.leaves[name] for name in "qkv")
    rows = torch.arange(q.shape[-3], device=q.device)[:, None]
    keys = torch.arange(k.shape[-3], device=k.device)[:, None]
    root = math.sqrt(q.shape[-1])
    if kind == "dominant":  # one channel decides
        q[..., 0] *= 20
        k[..., 0] *= 20
    elif kind == "equal":  # uniform weights
        k.fill_(0.5)
        q.fill_(-0.25)
    elif kind == "alternating":  # half the keys weigh nothing
        q.fill_(1.0)
        k.copy_((1.0 - 2.0 * (keys % 2))[..., None])
    elif kind == "one_hot":
        q.zero_()
        k.zero_()
        q[..., 3] = 30.0 * (rows % 7)
        k[..., 3] = 2.0 * (keys % 5) - 4.0
    elif kind == "low":  # all scores near -120: exp(score - 0) is a denormal in fp32
        q[..., 0] = 1.0
        k[..., 0] = -120.0 * root
    elif kind == "high":  # all near +120: exp(score) overflows
        q[..., 0] = 1.0
        k[..., 0] = 120.0 * root
    elif kind == "rising":  # every key tile has a new maximum
        q[..., 0] = 8.0
        k[..., 0] = (keys * 0.25 * root / 8).to(k.dtype)
    elif kind == "falling":
        q[..., 0] = 8.0
        k[..., 0] = (keys * -0.25 * root / 8).to(k.dtype)
    elif kind == "heavy":  # heavy tails
        for x in (q, k, v):
            x.copy_(x.sign() * x.abs() ** 3)
    elif kind == "large_values":
        v *= 1000


KINDS = (
    ["dominant", "equal", "alternating", "one_hot", "low", "high", "rising", "falling", "heavy"]
) + ["large_values"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_structured(kind, shape, dtype, device):
    case = cases.replace(SHAPES[shape], dtype=dtype)
    problem = Problem(case, device)
    with torch.no_grad():
        fill(problem, kind)
    check(case, device, problem=problem)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_structured_huge_equal_scores(sign, shape, dtype, device):
    """Every score is the same, about 2.5e5: the weights are uniform, though lse itself has no room
    for log(number of keys). Known without an oracle, in the backward pass as well."""
    case = cases.replace(SHAPES[shape], dtype="fp32", blocks=())
    problem = Problem(case, device)
    q, k, v = (problem.leaves[name].detach().to(dtype) for name in "qkv")
    q.fill_(0.0)
    k.fill_(0.0)
    q[..., 0] = 448.0
    k[..., 0] = 544.0 * sign
    v.fill_(1.0)
    problem.leaves = {"q": q, "k": k, "v": v}
    for x in problem.leaves.values():
        x.requires_grad_()
    out, lse = problem.call(return_lse=True, softmax_scale=1.0)
    live = (lse > float("-inf")).transpose(-1, -2)
    close = {"rtol": 2**-7, "atol": 0.0} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 0.0}
    torch.testing.assert_close(out[live], torch.ones_like(out[live]), **close)
    assert not out[~live].any()
    exact = torch.full_like(lse[live.transpose(-1, -2)], 448.0 * 544.0 * sign)
    torch.testing.assert_close(lse[live.transpose(-1, -2)], exact, rtol=1e-6, atol=7.0)

    # dv sums each key's weights over the queries of its group: together the number of live rows.
    dout = torch.ones_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))
    assert abs(dv[..., 0].double().sum().item() / live.sum().item() - 1) < 2**-6
    # v is constant, so no score matters: dp = delta in every row.
    assert max(dq.abs().max(), dk.abs().max()) <= 2**-6 * max(448.0, 544.0) * case.head_dim


@pytest.mark.parametrize("lengths", [(64, 64), (65, 129), (3, 257), (129, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_structured_permutation(lengths, dtype, device):
    """A query that matches one key far better than all others copies that key's value, to the bit:
    every (row, column) of every tile is met, so a swapped pair shows."""
    len_q, len_k = lengths
    dim = 64 if len_k <= 64 else 256
    q, k = (torch.zeros(1, n, 2, dim, device=device, dtype=dtype) for n in (len_q, len_k))
    order = torch.randperm(max(len_q, len_k), device=device)[:len_q] % len_k
    codes = torch.randint(0, 2, (len_k, dim), device=device) * 2.0 - 1.0
    k[0, :, :] = codes[:, None].to(dtype)
    q[0, :, :] = codes[order][:, None].to(dtype)
    v = torch.randn(1, len_k, 2, dim, device=device).to(dtype)
    out = flash_attn.flash_attn_func(q, k, v, softmax_scale=8.0)
    if dtype == torch.float32:  # a GPU may split fp32 into parts of 22 bits together
        torch.testing.assert_close(out[0], v[0, order], rtol=2**-21, atol=0)
    else:
        assert torch.equal(out[0], v[0, order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [70, 200])
def test_structured_one_hot_values(length, dtype, device):
    """v = identity shows each probability by itself, equal for all visible keys: row i of a causal
    pass holds 1 / (i + 1) up to the diagonal and exact zeros behind it."""
    q = torch.zeros(1, length, 1, 64, device=device, dtype=dtype)
    v = torch.eye(length, device=device, dtype=dtype)[None, :, None]
    out = flash_attn.flash_attn_func(q, q, v, causal=True)[0, :, 0]
    steps = torch.arange(1, length + 1, device=device, dtype=torch.float64)
    exact = torch.tril(torch.ones(length, length, device=device, dtype=torch.float64))
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21}[dtype]
    torch.testing.assert_close(out.double(), exact / steps[:, None], rtol=rounding, atol=0)
