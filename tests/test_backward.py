# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of the dense functions against the oracle; which inputs get one; strides of dout."""

import cases
import pytest
import torch
from problem import Problem, check, compare, poison, worst

import flash_attn

DENSE = [case for case in cases.ALL if not case.packed]


@pytest.mark.parametrize("case", DENSE, ids=cases.ids)
def test_backward(case, device):
    check(case, device)


@pytest.mark.parametrize("case", cases.REGULAR[:4] + cases.FEATURES[8:16], ids=cases.ids)
def test_backward_reference_backend(case, device):
    check(case, device, backend="reference")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_two_threads(two_threads, dtype, deterministic, device):
    case = cases.Case(
        batch=1,
        seqlen_q=500,
        seqlen_k=600,
        heads=2,
        heads_k=1,
        dtype=dtype,
        causal=True,
        bias="head",
        sinks=True,
        deterministic=deterministic,
    )
    check(case, device)


EVERYTHING = cases.Case(
    seqlen_q=33, seqlen_k=40, bias="head", slopes="heads", sinks=True, softcap=3.0
)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "slopes", "sinks"])
def test_backward_one_input_alone(name, device):
    """Each gradient alone equals the same gradient among all; the others are None."""
    problem = Problem(EVERYTHING, device)
    expected = problem.ours()
    for other, x in problem.leaves.items():
        x.requires_grad_(other == name)
    out = problem.call()
    out.backward(problem.dout)
    for other, x in problem.leaves.items():
        if other == name:
            torch.testing.assert_close(x.grad, expected[f"d{name}"])
        else:
            assert x.grad is None, other


def test_backward_lse_alone(device):
    """A loss of lse alone: dv is 0, the rest equals the oracle's."""
    problem = Problem(cases.Case(seqlen_q=33, seqlen_k=40, causal=True, lse_grad=True), device)
    problem.dout = torch.zeros_like(problem.dout)
    check(problem.case, device, problem=problem)
    assert not problem.ours()["dv"].any()


def test_backward_unused_output(device):
    """out unused: its gradient arrives as None and counts as 0."""
    problem = Problem(cases.Case(seqlen_q=9, seqlen_k=9), device)
    _, lse = problem.call(return_lse=True)
    lse.sum().backward()
    assert not problem.leaves["v"].grad.any() and problem.leaves["q"].grad.isfinite().all()


@pytest.mark.parametrize(
    "kind", ["expanded", "transposed", "every_second", "slice", "last_stride", "poisoned"]
)
def test_backward_dout_strides(kind, device):
    problem = Problem(
        cases.Case(seqlen_q=32, seqlen_k=32, heads=4, heads_k=1, head_dim=128), device
    )
    shape = (2, 32, 4, 128)
    dout = {
        "expanded": lambda: torch.ones((), device=device).expand(shape),
        "transposed": lambda: torch.randn(2, 4, 32, 128, device=device).transpose(1, 2),
        "every_second": lambda: torch.randn(2, 64, 4, 128, device=device)[:, ::2],
        "slice": lambda: torch.randn(2, 32, 12, 128, device=device)[:, :, 4:8],
        "last_stride": lambda: torch.randn(2, 32, 128, 4, device=device).transpose(2, 3),
        "poisoned": lambda: poison(torch.randn(shape, device=device)),
    }[kind]()
    leaves = [problem.leaves[name] for name in "qkv"]
    outs = [problem.call(deterministic=True) for _ in range(2)]
    expected = torch.autograd.grad(outs[0], leaves, dout.contiguous())
    found = torch.autograd.grad(outs[1], leaves, dout)
    # A GPU reads rows that are not aligned element by element, and sums them in another order.
    exact = device == "cpu" or kind != "poisoned"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("scale", [1e-3, 3.0, 100.0])
def test_backward_extreme_scores(scale, device):
    check(cases.Case(seqlen_q=40, seqlen_k=40, dtype="fp32", scale=scale, causal=True), device)


def test_backward_gradient_layout(device):
    """Gradients have the inputs' shapes; a broadcast head gets the sum of its copies."""
    k = torch.randn(1, 9, 1, 8, device=device, requires_grad=True)
    q = torch.randn(1, 5, 4, 8, device=device)
    wide = k.expand(1, 9, 4, 8)
    flash_attn.flash_attn_func(q, wide, wide).sum().backward()
    expected = k.grad.clone()
    k.grad = None
    flash_attn.flash_attn_func(q, k, k).sum().backward()
    torch.testing.assert_close(k.grad, expected)


def test_backward_saved_tensors_on_cpu(device):
    """Offloading hooks on saved tensors see tensors only, and the gradients stay the same."""
    case = cases.Case(seqlen_q=20, seqlen_k=361, bias="head", deterministic=True)
    problem = Problem(case, device)
    expected = problem.ours()
    with torch.autograd.graph.save_on_cpu():
        out = problem.call()
    found = torch.autograd.grad(out, list(problem.leaves.values()), problem.dout)
    for (name, _), grad in zip(problem.leaves.items(), found, strict=True):
        assert torch.equal(grad, expected[f"d{name}"])


def test_backward_checkpointing(device):
    """Recomputation draws the same dropout mask."""
    problem = Problem(cases.Case(seqlen_q=40, seqlen_k=40, dropout=0.3), device)
    leaves = [problem.leaves[name] for name in "qkv"]

    def run(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, dropout_p=0.3, deterministic=True)

    torch.manual_seed(5)
    expected = torch.autograd.grad(run(*leaves), leaves, problem.dout)
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)
    found = torch.autograd.grad(out, leaves, problem.dout)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_tolerance_rule_catches():
    """The comparison itself: an error of three times the reference's, a NaN, a wrong infinity
    fail."""
    exact = torch.linspace(0, 1, 100, dtype=torch.float64)
    exact[7] = float("-inf")
    compare({"x": [(exact.float(), exact, [1e-6])]})
    for value in (float("nan"), 0.0, float("inf")):
        wrong = exact.float()
        wrong[7] = value
        with pytest.raises(AssertionError, match=r"at \(7,\)"):
            compare({"x": [(wrong, exact, [1e-6])]})
    wrong = exact.float()
    wrong[3] += 4e-2
    with pytest.raises(AssertionError, match=r"at \(3,\)"):
        compare({"x": [(wrong, exact, [1e-2])]})
    assert worst(exact, exact) == (0.0, (0,))
