# SPDX-License-Identifier: BSD-3-Clause
"""Public bug reports as tests, continued: numerics, gradients, head dims."""

import math

import cases
import pytest
import torch
from problem import Problem, check, raw_forward

from flash_attn import flash_attn_func

NEG_INF = float("-inf")


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bc43_every_logit_very_negative(seqlen_q, dtype, scale, device):
    problem = Problem(cases.Case(1, seqlen_q, 64, 1, 1, 128, dtype=dtype, scale=scale), device)
    with torch.no_grad():
        problem.leaves["q"].zero_()[..., 0] = 448.0
        problem.leaves["k"].mul_(0.1)[..., 0] = -547.0
    check(problem.case, device, problem=problem)
    assert problem.call().abs().max() > 0.01


@pytest.mark.parametrize("mask", ["true", "triangle", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bc44_padded_tail_of_the_last_tile(mask, dtype, device):
    case = cases.Case(
        1,
        704,
        704,
        1,
        1,
        64,
        dtype=dtype,
        causal=mask == "causal",
        bias="mask" * (mask != "causal"),
    )
    problem = Problem(case, device)
    with torch.no_grad():
        problem.leaves["q"][..., 0] = 1.0
        problem.leaves["k"][..., 0] = -120.0 * 8
        if mask != "causal":
            bias = problem.leaves["bias"]
            bias.copy_(torch.ones(704, 704).tril() if mask == "triangle" else torch.ones(704, 704))
    check(case, device, problem=problem)


@pytest.mark.parametrize("softcap", [15.0, 50.0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bc46_softcap_formula(softcap, dtype, device):
    case = cases.Case(seqlen_q=64, seqlen_k=64, dtype=dtype, softcap=softcap)
    problem = Problem(case, device)
    with torch.no_grad():
        problem.leaves["q"] *= 5
    check(case, device, problem=problem)


@pytest.mark.parametrize("packed", [False, True])
def test_bc47_softcap_backward(packed, device):
    check(
        cases.Case(
            seqlen_q=128,
            seqlen_k=217,
            head_dim=128,
            softcap=15.0,
            window=(100, 20),
            packed=packed,
            dtype="bf16",
        ),
        device,
    )
    check(cases.Case(seqlen_q=256, seqlen_k=256, head_dim=128, softcap=10.0, causal=True), device)


@pytest.mark.parametrize(
    "dims", [(128, 96), (128, 8), (128, 40), (128, 120), (192, 128), (64, 128)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bc49_value_dims(dims, dtype, device):
    check(
        cases.Case(1, 70, 80, 2, 1, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, causal=True),
        device,
    )


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "slopes", "sinks"])
@pytest.mark.parametrize("packed", [False, True])
def test_bc77_only_one_input_needs_a_gradient(name, packed, device):
    case = cases.Case(
        seqlen_q=20,
        seqlen_k=30,
        bias="column",
        slopes="batch",
        sinks=True,
        packed=packed,
        lse_grad=True,
    )
    problem = Problem(case, device)
    expected = problem.ours()
    for other, x in problem.leaves.items():
        x.requires_grad_(other == name)
    found = problem.ours()
    assert set(found) == {"out", "lse", f"d{name}"}
    torch.testing.assert_close(found[f"d{name}"], expected[f"d{name}"])


@pytest.mark.parametrize("only_lse", [False, True])
def test_bc79_gradient_through_lse(only_lse, device):
    q, k, v = (torch.randn(1, n, 2, 16, device=device, requires_grad=True) for n in (9, 6, 6))

    def loss(q, k, v, **more):
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, **more)
        alive = lse.masked_fill(lse == NEG_INF, 0.0)  # three rows see nothing
        return alive.sum() if only_lse else out.sum() + alive.square().sum()

    found = torch.autograd.grad(loss(q, k, v), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(loss(*exact, backend="reference"), exact, materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert not found[0][:, :3].any() and (not only_lse or not found[2].any())


@pytest.mark.parametrize("shape", [(1, 1, 9, 12), (2, 1, 1, 12), (1, 4, 9, 12), (2, 4, 9, 12)])
def test_bc80_bias_and_slope_gradients(shape, device):
    q = torch.randn(2, 9, 4, 16, device=device)
    k, v = (torch.randn(2, 12, 2, 16, device=device) for _ in "kv")
    bias = torch.randn(shape, device=device, requires_grad=True)
    slopes = torch.rand(4, device=device, requires_grad=True)
    dout = torch.randn_like(q)

    def grads(**more):
        out = flash_attn_func(
            q, k, v, attn_bias=bias, alibi_slopes=slopes, deterministic=True, **more
        )
        return torch.autograd.grad(out, (bias, slopes), dout)

    found, again, expected = grads(), grads(), grads(backend="reference")
    for a, b, c in zip(found, again, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("seqlen_k", [0, 12])
@pytest.mark.parametrize("packed", [False, True])
def test_bc81_sinks(dtype, seqlen_k, packed, device):
    case = cases.Case(
        seqlen_q=30,
        seqlen_k=seqlen_k,
        dtype=dtype,
        sinks=True,
        causal=True,
        packed=packed,
        lse_grad=True,
    )
    check(case, device)
    if not packed:
        problem = Problem(case, device)
        out, lse = problem.call(return_lse=True)
        alone = 30 - seqlen_k
        sinks = problem.leaves["sinks"].float()[None, :, None]
        assert not out[:, :alone].any()
        torch.testing.assert_close(lse[:, :, :alone], sinks.expand(2, -1, alone))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bc82_query_to_key_head_map(dtype, device):
    check(
        cases.Case(
            seqlen_q=40, seqlen_k=50, heads=12, heads_k=3, head_dim=32, head_dim_v=48, dtype=dtype
        ),
        device,
    )
    # Each key head's values hold its number: query head h reads key head h // 4.
    v = torch.arange(3.0, device=device)[None, None, :, None].expand(1, 7, 3, 5)
    out = flash_attn_func(
        torch.randn(1, 2, 12, 8, device=device), torch.randn(1, 7, 3, 8, device=device), v
    )
    torch.testing.assert_close(out[0, 0, :, 0], torch.arange(12.0, device=device) // 4)


@pytest.mark.parametrize("dim", [1, 4, 7, 12, 46, 59, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bc87_head_dim_not_a_multiple_of_eight(dim, dtype, device):
    case = cases.Case(1, 33, 40, 2, 1, head_dim=dim, dtype=dtype, causal=True)
    check(case, device)
    q, k, v = (Problem(case, device).leaves[name].detach() for name in "qkv")
    out, _ = raw_forward(q, k, v, 1 / math.sqrt(dim), (-1, 0))
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))


def test_bc94_scales(device):
    q, k, v = (torch.randn(1, 20, 2, 16, device=device) for _ in range(3))
    uniform = flash_attn_func(q, k, v, softmax_scale=0.0, causal=True)
    steps = torch.arange(1, 21, device=device)[None, :, None, None]
    torch.testing.assert_close(uniform, v.cumsum(1) / steps)
    check(cases.Case(scale=-0.5, causal=True), device)
    check(cases.Case(scale=-0.5, dtype="bf16"), device)
    tensor = torch.tensor(0.3)
    assert torch.equal(
        flash_attn_func(q, k, v, softmax_scale=tensor),
        flash_attn_func(q, k, v, softmax_scale=tensor.item()),
    )
    with pytest.raises(ValueError, match="softmax_scale"):
        flash_attn_func(q, k, v, softmax_scale=float("nan"))
