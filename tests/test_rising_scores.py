# SPDX-License-Identifier: BSD-3-Clause
"""Long rows whose maximum rises late, often, or by very much: kernels that go by an old maximum as
long as they can. Keys are walked from the last to the first, so scores rise towards key 0."""

import math

import pytest
import torch
from problem import compare, worst

from flash_attn import flash_attn_func
from flash_attn.reference import attention

KEYS = 1700
JUMPS = (3, 150, 151, 700, 1100, 1500)


def rising(kind, rows, keys):
    """(rows, keys) scores in natural units."""
    noise = torch.randn(rows, keys)
    back = torch.arange(keys, 0.0, -1).expand(rows, keys)
    if kind == "steadily":
        return noise + back / 40
    if kind == "slowly":
        return noise + back / 600
    if kind == "noisy":
        return 8 * noise
    if kind == "at keys of one row":
        noise[5, list(JUMPS)] += torch.arange(10.0 * len(JUMPS), 0, -10)
        return noise
    if kind == "at keys":
        for row in range(rows):
            noise[row, JUMPS[row % len(JUMPS)]] += 4 + row
        return noise
    assert kind == "beyond exp2"
    return 1e4 * noise


def tensors(kind, head_dim, head_dim_v, dtype, device):
    """q and k whose products are about such scores: what q has in a dimension of its own."""
    torch.manual_seed(1)
    rows = 300
    low = rising(kind, head_dim, KEYS)
    q = torch.eye(head_dim).repeat(math.ceil(rows / head_dim), 1)[:rows] * math.sqrt(head_dim)
    k, v = low.T, torch.randn(KEYS, head_dim_v)
    return [x.to(device, dtype)[None, :, None] for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "kind", ["steadily", "slowly", "noisy", "at keys", "at keys of one row", "beyond exp2"]
)
def test_scores_that_rise(kind, dims, dtype, device):
    if kind == "beyond exp2" and dtype == torch.float16:
        pytest.skip("no such fp16 scores")
    inputs = tensors(kind, *dims, dtype, device)
    found = {"out": [], "lse": []}
    for causal in (False, True):
        ours = flash_attn_func(*inputs, causal=causal, return_lse=True)
        truth = attention(*(x.double() for x in inputs), causal=causal)
        plain = attention(*inputs, causal=causal, compute_dtype=dtype)
        for name, *results in zip(found, ours, truth, plain, strict=True):
            found[name].append((*results[:2], [worst(results[2], results[1])[0]]))
    compare(found, kind)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_rows_beside_one_that_rises_stay_as_they_are(dims, device):
    """To the bit: whether a neighbour's maximum rises is no part of a row's result."""
    q, k, v = tensors("at keys of one row", *dims, torch.bfloat16, device)
    calm = q.clone()
    calm[:, 5 :: dims[0]] = 0
    found, expected = (flash_attn_func(x, k, v) for x in (q, calm))
    same = torch.ones(q.shape[1], dtype=torch.bool)
    same[5 :: dims[0]] = False
    assert torch.equal(found[:, same], expected[:, same])


def features(heads, rows, device):
    """What a call may have besides, by name."""
    torch.manual_seed(2)
    slopes = torch.exp2(-torch.arange(1.0, heads + 1))
    bias = torch.randn(1, heads, rows, KEYS, dtype=torch.bfloat16)
    mask = torch.rand(1, 1, rows, KEYS) < 0.8
    mask[..., 0] = True
    arguments = {
        "alibi": {"alibi_slopes": slopes},
        "bias": {"attn_bias": bias},
        "mask": {"attn_bias": mask},
        "softcap 5": {"softcap": 5.0},
        "softcap 40": {"softcap": 40.0},
    }
    return {
        name: {k: v.to(device) if torch.is_tensor(v) else v for k, v in extra.items()}
        for name, extra in arguments.items()
    }


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["steadily", "slowly", "noisy", "at keys"])
@pytest.mark.parametrize("feature", ["alibi", "bias", "mask", "softcap 5", "softcap 40"])
def test_scores_that_rise_with_a_feature(feature, kind, head_dim, device):
    q, k, v = (
        x.expand(-1, -1, 2, -1) for x in tensors(kind, head_dim, head_dim, torch.bfloat16, device)
    )
    extra = features(2, q.shape[1], device)[feature]
    found = {"out": [], "lse": []}
    ours = flash_attn_func(q, k, v, **extra, return_lse=True)
    wide = {
        k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in extra.items()
    }
    truth = attention(*(x.double() for x in (q, k, v)), **wide)
    plain = attention(q, k, v, **extra, compute_dtype=torch.bfloat16)
    for name, *results in zip(found, ours, truth, plain, strict=True):
        found[name].append((*results[:2], [worst(results[2], results[1])[0]]))
    compare(found, f"{kind}, {feature}")
