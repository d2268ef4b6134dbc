# SPDX-License-Identifier: BSD-3-Clause
"""Forward mode, double backward and their mixtures, against numbers and against the reference."""

from dataclasses import replace

import pytest
import torch
from problem import Problem
from test_gradcheck import FEATURES, SMALL
from torch.autograd import forward_ad

import flash_attn
from flash_attn import _higher_order


@pytest.fixture
def few_rows(monkeypatch):
    """So few rows at a time that small problems come in several pieces."""
    monkeypatch.setattr(_higher_order, "_ROWS", 3)


# Slopes are fp32, too coarse for differences of gradients: test_hvp_of_slopes.
NAMES = ("empty-rows", "window", "softcap", "bias-column", "bias-one", "dropout", "blocks")
NAMES += ("varlen",)


@pytest.mark.parametrize("feature", NAMES)
def test_gradgradcheck(feature, few_rows):
    """Second derivatives and forward mode by numerical differences, in one random direction."""
    problem = Problem(replace(SMALL, **FEATURES[feature]))
    if problem.case.packed:  # numerical differences need finite rows everywhere
        with torch.no_grad():
            for name, lengths in (("q", "lens_q"), ("k", "lens_k"), ("v", "lens_k")):
                problem.leaves[name][sum(getattr(problem, lengths)) :] = 0
    names = [name for name, x in problem.leaves.items() if x.requires_grad]

    def run(*inputs):
        problem.leaves.update(zip(names, inputs, strict=True))
        out, lse = problem.call(return_lse=True)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    wide = [problem.leaves[name].detach().double().requires_grad_() for name in names]
    assert torch.autograd.gradgradcheck(run, wide, fast_mode=True)
    assert torch.autograd.gradcheck(
        run, wide, check_forward_ad=True, check_backward_ad=False, fast_mode=True
    )


def losses(device, **options):
    """A scalar function of q by our kernels, and the same by the reference; q and a direction."""
    q = torch.randn(2, 9, 4, 8, device=device)
    k, v = (torch.randn(2, 11, 2, 8, device=device) for _ in "kv")

    def loss(backend):
        def run(q):
            out = flash_attn.flash_attn_func(q, k, v, causal=True, backend=backend, **options)
            return out.square().sum()

        return run

    return loss(None), loss("reference"), q, torch.randn_like(q)


def eager_hvp(loss, q, t):
    x = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad((grad * t).sum(), x)[0]


def eager_third(loss, q, t):
    x = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad((first * t).sum(), x, create_graph=True)
    return torch.autograd.grad((second * t).sum(), x)[0]


def eager_jvp(loss, q, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(q, t))).tangent


def map_jvp(loss, q, t):
    return torch.vmap(lambda x: torch.func.jvp(loss, (x,), (t,))[1])(torch.stack([q, -q]))


WAYS = {
    "eager-jvp": eager_jvp,
    "eager-hvp": eager_hvp,
    "eager-third": eager_third,
    "jvp": lambda f, q, t: torch.func.jvp(f, (q,), (t,))[1],
    "jvp-of-grad": lambda f, q, t: torch.func.jvp(torch.func.grad(f), (q,), (t,))[1],
    "grad-of-jvp": lambda f, q, t: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (t,))[1])(q),
    "grad-of-grad": lambda f, q, t: torch.func.grad(lambda x: (torch.func.grad(f)(x) * t).sum())(q),
    "vmap-of-jvp": map_jvp,
    "hessian": lambda f, q, t: torch.func.hessian(lambda x: f(q + x * t))(q.new_tensor(0.3)),
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms_of_transforms(way, device, few_rows):
    loss, plain, q, t = losses(device, softcap=2.0)
    found, expected = WAYS[way](loss, q, t), WAYS[way](plain, q, t)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_forward_mode_twice_is_refused():
    """torch would give wrong numbers there, in silence."""
    loss, _, q, t = losses("cpu")
    with pytest.raises(NotImplementedError, match="jvp of jvp"):
        torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (t,))[1], (q,), (t,))


def test_jvp_inside_a_compiled_function(device):
    """Left to eager mode, where a graph would lose the tangents; an error with fullgraph."""
    torch.compiler.reset()
    loss, plain, q, t = losses(device)

    def run(q, t):
        return torch.func.jvp(loss, (q,), (t,))[1]

    found = torch.compile(run, backend="eager")(q, t)
    expected = torch.func.jvp(plain, (q,), (t,))[1]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(run, backend="eager", fullgraph=True)(q, t)


def test_vmap_inside_a_graph(device):
    torch.compiler.reset()
    q = torch.randn(3, 1, 6, 2, 8, device=device)

    def run(q):
        return torch.vmap(lambda x: flash_attn.flash_attn_func(x, x, x, causal=True))(q)

    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(q), run(q))


def test_hvp_of_slopes(device, few_rows):
    """Through ALiBi's slopes and the inputs together, in fp32."""
    q, k, v = (torch.randn(2, 7, 2, 8, device=device, requires_grad=True) for _ in "qkv")
    slopes = torch.rand(2, 2, device=device, requires_grad=True)
    leaves, found = (q, k, v, slopes), []
    for backend in (None, "reference"):
        out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_second_derivatives_in_half_precision(device):
    """A gradient penalty as it is used: bf16 inputs, sums over pieces in fp32."""
    q, k, v = (
        torch.randn(1, 600, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    found = []
    for leaves, backend in (((q, k, v), None), (wide, "reference")):
        out = flash_attn.flash_attn_func(*leaves, causal=True, backend=backend)
        grads = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
        penalty = sum(g.float().square().sum() for g in grads)
        found.append(torch.autograd.grad(penalty, leaves))
    for a, b in zip(*found, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() < 0.02 * b.norm()
