# SPDX-License-Identifier: BSD-3-Clause
"""Random problems (hypothesis): any shape with any features against the oracle, and laws that
hold for all."""

import cases
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problem import check

import flash_attn

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def any_case(draw):
    heads_k = draw(st.integers(1, 3))
    side = st.integers(-1, 90)
    return cases.Case(
        batch=draw(st.integers(0, 3)),
        seqlen_q=draw(st.integers(0, 80)),
        seqlen_k=draw(st.integers(0, 150)),
        heads=heads_k * draw(st.integers(1, 4)),
        heads_k=heads_k,
        head_dim=draw(st.integers(1, 72)),
        head_dim_v=draw(st.integers(0, 72)),
        dtype=draw(st.sampled_from(["fp32", "bf16", "fp16", "fp64"])),
        packed=draw(st.booleans()),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), None])) or (draw(side), draw(side)),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 20.0])),
        slopes=draw(st.sampled_from(["", "", "heads", "batch"])),
        bias=draw(st.sampled_from(["", "", "full", "row", "column", "head", "one", "mask"])),
        bias_fp32=draw(st.booleans()),
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.1, 0.6])),
        blocks=draw(st.sampled_from([(), (), (16, 16), (5, 40), (64, 1)])),
        lse_grad=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.0, -0.4, 1.0])),
    )


@SETTINGS
@given(case=any_case())
def test_properties_any_case(case, device):
    if device == "cuda" and case.dtype == "fp64":
        case = cases.replace(case, dtype="bf16")
    check(case, device)


@settings(SETTINGS, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6),
    st.booleans(),
    st.integers(-1, 12),
)
def test_properties_packing_changes_nothing(lengths, causal, left):
    """Any sequences packed together give what each gives alone."""
    cu = [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True)] or [
        torch.zeros(1).int()
    ] * 2
    q, k, v = (torch.randn(int(c[-1]), 2, 8) for c in (cu[0], cu[1], cu[1]))
    mask = {"causal": causal, "window_size": (left, -1)}
    packed = flash_attn.flash_attn_varlen_func(q, k, v, *cu, **mask)
    for b, (len_q, len_k) in enumerate(lengths):
        rows = slice(int(cu[0][b]), int(cu[0][b]) + len_q)
        keys = slice(int(cu[1][b]), int(cu[1][b]) + len_k)
        alone = flash_attn.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], **mask)
        assert torch.equal(packed[rows], alone[0])


@settings(SETTINGS, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 80), st.integers(0, 2**31), st.booleans())
def test_properties_laws(seqlen_q, seqlen_k, seed, causal):
    """Weights sum to one; shifting all scores changes nothing; keys may come in any order."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, 2, 16, generator=rng) for n in (seqlen_q, seqlen_k, seqlen_k))
    ones = flash_attn.flash_attn_func(q, k, torch.ones_like(v), return_lse=True, causal=causal)
    alive = ones[1] > float("-inf")
    torch.testing.assert_close(ones[0].transpose(1, 2)[..., 0], alive.float())
    shift = torch.full((1, 1, 1, 1), 7.25)
    a = flash_attn.flash_attn_func(q, k, v, return_lse=True)
    b = flash_attn.flash_attn_func(q, k, v, attn_bias=shift, return_lse=True)
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a[1] + 7.25, b[1])
    order = torch.randperm(seqlen_k, generator=rng)
    c = flash_attn.flash_attn_func(q, k[:, order], v[:, order])
    torch.testing.assert_close(a[0], c, rtol=1e-5, atol=1e-5)
