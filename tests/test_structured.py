# SPDX-License-Identifier: BSD-3-Clause
"""Values and lengths that random normal numbers never show, forward and backward: one dominant
channel, equal scores, one-hot rows, alternating signs, scores of hundreds of thousands. Each kind
also under masks, packed, with few queries, and on lengths that leave a tail in the last tile."""

import math

import cases
import pytest
import torch
from problem import Problem, assert_copies, check, worst

import flash_attn

SHAPES = {
    "tail": cases.Case(1, 65, 129, 2, 1, 64, causal=True),
    "long": cases.Case(1, 33, 257, 4, 1, 128),
    "packed": cases.Case(packed=True, seqlen_q=70, seqlen_k=97, head_dim=40, causal=True),
    "window": cases.Case(1, 200, 200, 2, 2, 64, window=(33, 5)),
    "blocks": cases.Case(1, 130, 200, 2, 2, 64, blocks=(64, 64)),
    "decode": cases.Case(8, 1, 513, 8, 2, 64),
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
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_structured_huge_equal_scores(sign, shape, dtype, device):
    """Every score is the same, about 2.4e5: weights are uniform, though lse itself has no room for
    log(number of keys), neither in the backward pass nor where partial results are merged."""
    case = cases.replace(SHAPES[shape], dtype=dtype, scale=1.0)
    problem = Problem(case, device)
    q, k, v = (problem.leaves[name] for name in "qkv")
    with torch.no_grad():
        q.zero_()[..., 0] = 448.0
        k.zero_()[..., 0] = 544.0 * sign
    found, exact = problem.ours(), problem.oracle(torch.float64)
    rounding = {"bf16": 2**-7, "fp16": 2**-9, "fp32": 2**-16}[dtype]
    for name in ("out", "dv", "dk"):
        size = float(exact[name].abs().max())
        assert worst(found[name], exact[name])[0] <= rounding * size, name
    assert worst(found["lse"], exact["lse"])[0] <= 448 * 544 * 2**-23
    # All keys are alike, so the gradients of their scores cancel.
    assert float(found["dq"].abs().max()) <= rounding * 544 * case.head_dim


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
    assert_copies(out[0], v[0, order])


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
