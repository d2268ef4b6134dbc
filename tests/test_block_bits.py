# SPDX-License-Identifier: BSD-3-Clause
"""Blocks that are partly visible: kernels that read their bits, against the oracle and SDPA, and
block-sparse attention under its own name."""

import inspect

import cases
import pytest
import torch
from problem import Problem, check
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
from flash_attn import BlockMask, flash_attn_blocksparse_func


@pytest.mark.parametrize(
    "size", [(64, 64), (128, 128), (64, 128), (128, 64), (33, 70), (8, 32), (1, 7)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_sizes(size, dtype, device):
    check(cases.Case(seqlen_q=150, seqlen_k=200, dtype=dtype, blocks=size, bits=True), device)


FEATURES = {
    "causal": {"causal": True, "seqlen_q": 140},
    "window": {"window": (60, 5)},
    "packed": {"packed": True, "causal": True},
    "gqa": {"heads": 6, "heads_k": 1},
    "softcap-bias": {"softcap": 2.0, "bias": "full"},
    "slopes-sinks": {"slopes": "batch", "sinks": True},
    "dropout": {"dropout": 0.3},
    "mask": {"bias": "mask"},
    "dims": {"head_dim": 40, "head_dim_v": 24},
    "deterministic": {"deterministic": True},
    "few-rows": {"seqlen_q": 2, "seqlen_k": 300},
    "negative-scale": {"scale": -0.7},
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_bits_features(name, dtype, device):
    if dtype == "fp64" and device == "cuda":
        pytest.skip("fp64 is for the CPU")
    sizes = {"seqlen_q": 100, "seqlen_k": 140, "blocks": (32, 48), "bits": True, "lse_grad": True}
    check(cases.Case(dtype=dtype, **sizes | FEATURES[name]), device)


def patterns(seqlen, device):
    more = {"block_size": 64, "device": device}
    ids = torch.randint(0, 3, (2, seqlen), device=device).sort(1).values
    scores = torch.randn(2, 4, -(-seqlen // 64), -(-seqlen // 64), device=device)
    square = seqlen, seqlen
    return {
        "window": BlockMask.sliding_window(*square, (50, 10), **more),
        "sink": BlockMask.sink_window(*square, 3, 70, **more),
        "global": BlockMask.window_global(*square, 20, 5, **more),
        "prefix": BlockMask.prefix_lm(*square, [30, 150], **more),
        "documents": BlockMask.documents(ids=ids, causal=True, block_size=64),
        "strided": BlockMask.strided(*square, 2, **more),
        "fixed": BlockMask.fixed(*square, 2, **more),
        "dilated": BlockMask.dilated(*square, 1, 2, **more),
        "butterfly": BlockMask.butterfly(*square, **more),
        "topk": BlockMask.topk(scores, 2, *square, causal=True, block_size=64),
        "predicate": BlockMask.from_predicate(
            lambda b, h, q, k: (q + k + h) % 7 < 3, 2, 4, *square, **more
        ),
    }


@pytest.mark.parametrize("name", patterns(8, "cpu"))
@pytest.mark.parametrize("causal", [False, True])
def test_bits_patterns_against_sdpa(name, causal, device):
    """Out and gradients, GQA, a length that is no multiple of the block."""
    mask = patterns(300, device)[name]
    q = torch.randn(2, 300, 4, 32, device=device, requires_grad=True)
    k, v = (torch.randn(2, 300, 2, 32, device=device, requires_grad=True) for _ in "kv")
    out = flash_attn_blocksparse_func(q, k, v, mask, causal=causal)
    elements = mask.to_elements()
    if causal:
        elements = elements.tril()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    live = elements.any(3, keepdim=True)
    expected = scaled_dot_product_attention(
        *heads_first, attn_mask=elements | ~live, enable_gqa=True
    )
    expected = (expected * live).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    grads = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_of_whole_blocks_change_nothing(dtype, device):
    """A tile of ones is a whole block."""
    problem = Problem(cases.Case(seqlen_q=128, seqlen_k=192, dtype=dtype, heads_k=4), device)
    blocks = torch.rand(2, 4, 2, 3, device=device) < 0.7
    plain = BlockMask.from_dense(blocks, 64)
    ones = torch.full((1, 64, 2), -1, dtype=torch.int32, device=device)
    tiles = [torch.where(x >= 0, 0, -1).int() for x in (plain.indices, plain.indices_t)]
    cut = BlockMask((64, 64), *plain.lists[:4], *tiles, ones)
    q, k, v = (problem.leaves[name] for name in "qkv")
    results = [flash_attn_blocksparse_func(q, k, v, mask, return_lse=True) for mask in (plain, cut)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    grads = [torch.autograd.grad(out, (q, k, v), problem.dout) for out, _ in results]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_bits_rows_and_columns_that_see_nothing(device):
    """Inside listed blocks: out 0, lse -inf, gradients exactly 0."""
    q, k, v = (torch.randn(1, 128, 2, 16, device=device, requires_grad=True) for _ in "qkv")
    mask = BlockMask.from_predicate(
        lambda b, h, i, j: (i % 5 != 0) & (j % 3 != 0), None, None, 128, 128, 64, device
    )
    out, lse = flash_attn_blocksparse_func(q, k, v, mask, return_lse=True)
    rows, columns = torch.arange(128) % 5 == 0, torch.arange(128) % 3 == 0
    assert not out[:, rows].any() and (lse[:, :, rows] == float("-inf")).all()
    assert lse[:, :, ~rows].isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse[:, :, ~rows].sum(), (q, k, v))
    assert not grads[0][:, rows].any() and not grads[1][:, columns].any()
    assert not grads[2][:, columns].any() and all(grad.isfinite().all() for grad in grads)


def test_bits_with_huge_scores(device):
    """Where lse has no digits left for log(l), the backward pass walks the bits once more."""
    q, k = (torch.full((1, 96, 2, 16), 16.0, device=device) for _ in "qk")
    v = torch.randn(1, 96, 2, 16, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = BlockMask.from_predicate(
        lambda b, h, i, j: (i + j) % 3 != 1, None, None, 96, 96, 32, device
    )
    results = []
    for backend in (None, "reference"):
        out = flash_attn_blocksparse_func(*leaves, mask, softmax_scale=4.0, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_bits_over_a_cache(seqlen_q, device):
    """A mask over the cache's slots, split keys and few rows included; live lengths below it."""
    q = torch.randn(2, seqlen_q, 4, 16, device=device)
    cache = [torch.randn(2, 640, 2, 16, device=device) for _ in "kv"]
    lengths = torch.tensor([640, 333], dtype=torch.int32, device=device)
    mask = BlockMask.from_predicate(
        lambda b, h, i, j: (j * 5 + i + h) % 4 != 0, None, 4, seqlen_q, 640, 64, device
    )
    found, expected = (
        flash_attn.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=lengths, block_mask=mask, causal=True, backend=backend
        )
        for backend in (None, "reference")
    )
    torch.testing.assert_close(found, expected)


def test_bits_in_packed_calls_past_the_mask_made_for(device):
    """Packed sequences shorter than the mask; its lengths are not compared."""
    cu = torch.tensor([0, 90, 90, 130], dtype=torch.int32, device=device)
    q = torch.randn(130, 2, 16, device=device)
    mask = BlockMask.sliding_window(200, 200, (9, 4), block_size=32, device=device)
    found = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, block_mask=mask)
    expected = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, window_size=(9, 4))
    torch.testing.assert_close(found, expected)


def test_bits_compile(device):
    torch.compiler.reset()
    q = torch.randn(2, 100, 2, 16, device=device, requires_grad=True)
    mask = BlockMask.sliding_window(100, 100, (20, 3), block_size=32, device=device)

    def run(q, mask):
        return flash_attn_blocksparse_func(q, q, q, mask, causal=True)

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, mask)
    expected = run(q, mask)
    torch.testing.assert_close(out, expected)
    (found,), (grad,) = (torch.autograd.grad(x.square().sum(), q) for x in (out, expected))
    torch.testing.assert_close(found, grad)


def test_bits_vmap(device):
    q = torch.randn(3, 2, 70, 2, 16, device=device)
    mask = BlockMask.sliding_window(70, 70, (20, 3), block_size=32, device=device)

    def loss(q):
        return flash_attn_blocksparse_func(q, q, q, mask).square().sum()

    grads = torch.stack([torch.func.grad(loss)(x) for x in q])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(q), grads)


def test_blocksparse_signature():
    """flash_attn_func's arguments under the same names and defaults, the mask after v."""
    ours = dict(inspect.signature(flash_attn_blocksparse_func).parameters)
    theirs = dict(inspect.signature(flash_attn.flash_attn_func).parameters)
    assert list(ours)[:4] == ["q", "k", "v", "block_mask"]
    del ours["block_mask"], theirs["block_mask"]
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].default == theirs[name].default and ours[name].kind == theirs[name].kind
    assert "flash_attn_blocksparse_func" in flash_attn.__all__


def test_blocksparse_returns(device):
    q = torch.randn(1, 64, 2, 16, device=device)
    mask = BlockMask.sliding_window(64, 64, 20, block_size=16, device=device)
    out, lse = flash_attn_blocksparse_func(q, q, q, mask, return_lse=True)
    assert lse.shape == (1, 2, 64)
    torch.manual_seed(3)
    out, lse, probs = flash_attn_blocksparse_func(q, q, q, mask, 0.3, return_attn_probs=True)
    assert probs.shape == (1, 2, 64, 64) and not probs[:, :, ~mask.to_elements()[0, 0]].any()


# ---- errors


def call(mask, length=64, **more):
    q = torch.randn(1, length, 2, 8)
    return flash_attn_blocksparse_func(q, q, q, mask, **more)


def test_blocksparse_errors():
    window = BlockMask.sliding_window(64, 60, 5, block_size=32)
    with pytest.raises(ValueError, match="made for seqlen_k 60, got 64"):
        call(window)
    with pytest.raises(TypeError, match="block_mask must be a flash_attn.BlockMask, got NoneType"):
        call(None)
    theirs = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu", 32)
    with pytest.raises(TypeError, match="BlockMask.from_flex_attention"):
        call(theirs)
    call(BlockMask.from_flex_attention(theirs))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_bits_tile_out_of_range(backend):
    mask = BlockMask.sliding_window(64, 64, 5, block_size=32)
    mask.bits_index[0, 0, 1, 0] = len(mask.bits)
    with pytest.raises(ValueError, match=f"bits_index must lie in 0 to {len(mask.bits) - 1}"):
        call(mask, backend=backend)


@pytest.mark.parametrize("wrong", ["bits", "bits_index", "bits_index_t"])
@pytest.mark.parametrize("kind", ["missing", "shape", "dtype"])
def test_bits_wrong_tensors(wrong, kind):
    """The operator's own checks: masks are made by hand only here."""
    mask = BlockMask.sliding_window(64, 64, 5, block_size=32)
    good = getattr(mask, wrong)
    setattr(mask, wrong, {"missing": None, "shape": good[..., :-1], "dtype": good.long()}[kind])
    if kind == "shape" and wrong == "bits":
        mask.bits = good[:, :-1]
    with pytest.raises(TypeError if kind == "dtype" else ValueError, match="bits"):
        call(mask)


def test_bits_travel_with_the_mask(device):
    mask = BlockMask.sliding_window(64, 64, 5, block_size=32)
    moved = mask.to(device)
    assert moved.device.type == device and moved.seqlens == (64, 64)
    assert all(x.device.type == device for x in moved.lists)
    assert torch.equal(moved.to_elements().cpu(), mask.to_elements())
    q = torch.randn(1, 64, 2, 8)
    assert flash_attn.explain(q, q, q, block_mask=mask).backend == "cpu"
