# SPDX-License-Identifier: BSD-3-Clause
"""Dropout: the same decisions everywhere, their rate, seeds, and gradients with them."""

import cases
import oracle
import pytest
import torch
from conftest import needs_cuda
from problem import Problem, check, raw_forward

import flash_attn


def mask_of(q, k, p, backend=None, **more):
    """(batch, heads, seqlen_q, seqlen_k) bool, what survives."""
    probs = flash_attn.flash_attn_func(
        q, k, k, dropout_p=p, return_attn_probs=True, backend=backend, **more
    )[2]
    return ~torch.signbit(probs)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_parity(p, dtype, packed, device):
    check(
        cases.Case(
            seqlen_q=70,
            seqlen_k=90,
            dtype=dtype,
            dropout=p,
            packed=packed,
            causal=True,
            lse_grad=True,
        ),
        device,
    )


def test_dropout_philox_written_out(device):
    """Known answer of the op: its decisions, read off one-hot values, are those of the design's
    formula."""
    seed, offset, p = 0x1234_5678_9ABC_DEF0, 77, 0.4
    philox = torch.tensor([seed, offset], device=device)
    q = torch.zeros(2, 37, 3, 4, device=device)
    k = torch.zeros(2, 70, 3, 4, device=device)
    v = torch.eye(70, device=device).expand(2, 3, 70, 70).transpose(1, 2)
    out, _ = raw_forward(q, k, v, dropout_p=p, philox=philox)
    expected = oracle.philox_keep(seed, offset, 2, 3, 37, 70, p)
    assert torch.equal(out.transpose(1, 2).cpu() > 0, expected)
    torch.testing.assert_close(out.max().item(), oracle.realised_scale(p) / 70)


def test_dropout_counts_inside_each_packed_sequence(device):
    """Rows and keys from the sequence's own beginning, batch being its index."""
    seed, offset, p, lens_q, lens_k = 5, 9, 0.4, [21, 0, 34], [40, 3, 35]
    philox = torch.tensor([seed, offset], device=device)
    cu_q, cu_k = (
        torch.tensor([0, *lens], device=device).cumsum(0, dtype=torch.int32)
        for lens in (lens_q, lens_k)
    )
    q, k = (torch.zeros(sum(lens), 2, 8, device=device) for lens in (lens_q, lens_k))
    v = torch.cat([torch.eye(n, 40, device=device) for n in lens_k])[:, None].expand(-1, 2, -1)
    given = q, k, v.contiguous(), cu_q, cu_k, *(None,) * 14, philox
    out, _ = torch.ops.flash_attn.forward(*given, 1.0, 0.0, p, -1, -1, 0, 0, False, 0)
    keep = oracle.philox_keep(seed, offset, 3, 2, 34, 40, p)
    for b, rows in enumerate(out.cpu().split(lens_q)):
        found = rows.transpose(0, 1)[..., : lens_k[b]] > 0
        assert torch.equal(found, keep[b, :, : lens_q[b], : lens_k[b]])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_dropout_mask_equals_reference_bitwise(dtype, device):
    """What the kernels drop, read off one-hot values, is what S_dmask and the reference say."""
    dtype = cases.DTYPES[dtype]
    q = torch.zeros(2, 75, 4, 8, device=device, dtype=dtype)
    k = torch.zeros(2, 100, 2, 8, device=device, dtype=dtype)
    v = torch.eye(100, device=device, dtype=dtype)[None, :, None].expand(2, -1, 2, -1)
    torch.manual_seed(3)
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.35)
    torch.manual_seed(3)
    ours = mask_of(q, k, 0.35)
    torch.manual_seed(3)
    reference = mask_of(q, k, 0.35, backend="reference")
    assert torch.equal(ours, reference)
    assert torch.equal(out.transpose(1, 2) != 0, ours)


def test_dropout_backward_uses_the_forward_mask(device):
    """dv of one-hot gradients shows the mask that the backward used."""
    q = torch.zeros(1, 40, 2, 8, device=device)
    k = torch.zeros(1, 50, 2, 8, device=device)
    v = torch.zeros(1, 50, 2, 40, device=device, requires_grad=True)
    torch.manual_seed(11)
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    dout = torch.eye(40, device=device)[None, :, None].expand(1, -1, 2, -1)
    (dv,) = torch.autograd.grad(out, v, dout)  # (1, key, head, query)
    torch.manual_seed(11)
    assert torch.equal(dv.permute(0, 2, 3, 1) != 0, mask_of(q, k, 0.5))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate(p, device):
    """4 million decisions: within five standard deviations of p, and not alike between heads or
    rows."""
    q = torch.zeros(2, 512, 4, 1, device=device)
    k = torch.zeros(2, 1024, 4, 1, device=device)
    keep = mask_of(q, k, p)
    n = keep.numel()
    assert abs(keep.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5 + 2**-16
    for dim in range(4):
        halves = keep.float().chunk(2, dim)
        same = (halves[0] == halves[1]).float().mean().item()
        assert abs(same - (p * p + (1 - p) ** 2)) < 0.01


def test_dropout_expectation(device):
    """The mean over many seeds approaches attention without dropout."""
    q, k, v = (torch.randn(1, 8, 2, 16, device=device) for _ in range(3))
    exact = flash_attn.flash_attn_func(q, k, v)
    mean = sum(flash_attn.flash_attn_func(q, k, v, dropout_p=0.2) for _ in range(400)) / 400
    assert (mean - exact).abs().max() < 0.15


def test_dropout_lse_is_without_dropout(device):
    q = torch.randn(1, 8, 2, 16, device=device)
    _, a = flash_attn.flash_attn_func(q, q, q, return_lse=True)
    _, b = flash_attn.flash_attn_func(q, q, q, dropout_p=0.5, return_lse=True)
    torch.testing.assert_close(a, b)


def test_dropout_s_dmask(device):
    """exp(s - row maximum), negative where dropped; empty at p = 0; varlen: the longest
    lengths."""
    q, k = torch.randn(2, 9, 4, 16, device=device), torch.randn(2, 13, 4, 16, device=device)
    out, lse, probs = flash_attn.flash_attn_func(
        q, k, k, dropout_p=0.3, causal=True, return_attn_probs=True
    )
    assert probs.shape == (2, 4, 9, 13)
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    seen = oracle.visible(oracle.Rule(1.0, (-1, 0)), 9, 13, device)
    s = s.masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(probs.abs(), (s - s.amax(3, keepdim=True)).exp())
    weights = probs.clamp(min=0) / probs.abs().sum(3, keepdim=True) * oracle.realised_scale(0.3)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, k), out)
    problem = Problem(cases.Case(packed=True, dropout=0.3), device)
    probs = problem.call(return_attn_probs=True)[2]
    assert probs.shape == (problem.batch, 4, *problem.longest)


def test_dropout_seeds(device):
    """Two calls differ, the same seed repeats both, and torch's generator moves on."""
    q = torch.randn(1, 30, 2, 16, device=device)

    def draw():
        return flash_attn.flash_attn_func(q, q, q, dropout_p=0.2)

    torch.manual_seed(1)
    a, b, after = draw(), draw(), torch.rand(1, device=device)
    torch.manual_seed(1)
    c, d = draw(), draw()
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)
    torch.manual_seed(1)
    assert not torch.equal(torch.rand(1, device=device), after)


@pytest.mark.parametrize("p", [1e-16, 1e-5])
def test_dropout_tiny(p, device):
    q = torch.randn(1, 30, 2, 16, device=device)
    out = flash_attn.flash_attn_func(q, q, q, dropout_p=p)
    if p < 1e-10:
        torch.testing.assert_close(out, flash_attn.flash_attn_func(q, q, q), rtol=1e-4, atol=1e-4)
    assert out.isfinite().all()


def test_dropout_none_draws_nothing(device):
    """Without dropout the generator stays where it was."""
    q = torch.randn(1, 5, 2, 8, device=device)
    state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    before = state()
    flash_attn.flash_attn_func(q, q, q)
    assert torch.equal(state(), before)


@needs_cuda
def test_dropout_mask_is_that_of_the_cpu():
    """One seed and offset, every dtype, behind a window: the same decisions on both devices, in the
    backward pass too."""
    philox = torch.tensor([0x0FED_CBA9_8765_4321, 12345])
    sizes = [(dtype, length) for dtype in ("fp32", "bf16", "fp16") for length in (64, 130)]
    for dtype, length in sizes:
        masks = []
        for device in ("cpu", "cuda"):
            q = torch.zeros(2, 99, 4, 64, device=device, dtype=cases.DTYPES[dtype])
            k = torch.zeros(2, length, 2, 64, device=device, dtype=q.dtype)
            v = torch.eye(length, device=device, dtype=q.dtype)[None, :, None].repeat(2, 1, 2, 1)
            out, _ = raw_forward(
                q, k, v.requires_grad_(), dropout_p=0.4, philox=philox.to(device), window=(-1, 60)
            )
            dout = torch.eye(99, 130, device=device, dtype=q.dtype)[None, :, None, :length]
            (dv,) = torch.autograd.grad(out, v, dout.expand_as(out))
            masks.append(((out != 0).cpu(), (dv != 0).cpu()))
        assert torch.equal(masks[0][0], masks[1][0]) and torch.equal(masks[0][1], masks[1][1])
        assert masks[0][0].any() and masks[0][1].any()
