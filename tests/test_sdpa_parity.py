# SPDX-License-Identifier: BSD-3-Clause
"""torch.nn.functional.scaled_dot_product_attention, which others trust: forward and gradients."""

import cases
import pytest
import torch
from problem import compare, worst
from torch.nn.functional import scaled_dot_product_attention

import flash_attn

KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"mask": "bool"},
    "bias": {"mask": "float"},
    "scale": {"scale": 0.7},
}


def run(attention, leaves, mask, dout):
    out = attention(*leaves, mask)
    return {
        "out": out,
        **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True)),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_sdpa_parity(kind, dtype, heads_k, device):
    """As near to fp64 as SDPA in the same dtype is, within the tolerance rule."""
    causal, scale = KINDS[kind].get("causal", False), KINDS[kind].get("scale")
    q = torch.randn(2, 100, 4, 64, device=device).to(cases.DTYPES[dtype])
    k, v = (torch.randn(2, 100, heads_k, 64, device=device).to(q.dtype) for _ in "kv")
    mask = None
    if "mask" in KINDS[kind]:
        mask = torch.rand(2, 1, 100, 100, device=device) < 0.8
        mask[..., 0] = True
        if KINDS[kind]["mask"] == "float":
            mask = torch.randn(2, 4, 100, 100, device=device).to(q.dtype)
    dout = torch.randn_like(q)

    def ours(q, k, v, mask):
        return flash_attn.flash_attn_func(
            q, k, v, softmax_scale=scale, causal=causal, attn_bias=mask
        )

    def sdpa(q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads_k < 4
        )
        return out.transpose(1, 2)

    def leaves(to):
        return [x.detach().to(to).requires_grad_() for x in (q, k, v)]

    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = run(sdpa, leaves(torch.float64), wide, dout.double())
    found = run(ours, leaves(q.dtype), mask, dout)
    reference = run(sdpa, leaves(q.dtype), mask, dout)
    compare(
        {
            name: [(found[name], exact[name], [worst(reference[name], exact[name])[0]])]
            for name in exact
        },
        f"{kind}-{dtype}-hk{heads_k}",
    )
