# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn.layers.rotary and ops.triton.rotary against plain torch: values, gradients, layouts,
in-place forms, tables."""

import pytest
import torch

from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from flash_attn.ops.triton.rotary import apply_rotary

LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])


def tables(positions=11, width=8, dtype=torch.float32, device="cpu"):
    angles = torch.rand(positions, width // 2, device=device) * 6
    angles[0] = 0
    return angles.cos().to(dtype), angles.sin().to(dtype)


@LAYOUTS
@pytest.mark.parametrize("offset", [0, 3, "tensor"])
def test_rotary_values_and_gradients(interleaved, offset, device):
    x = torch.randn(2, 5, 3, 12, device=device, requires_grad=True)
    cos, sin = tables(device=device)
    starts = [1, 6] if offset == "tensor" else [offset, offset]
    given = torch.tensor(starts, device=device) if offset == "tensor" else offset
    own = [torch.stack([table[s : s + 5] for s in starts]) for table in (cos, sin)]
    expected = apply_rotary_emb_torch(x, *own, interleaved)
    found = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    torch.testing.assert_close(found, expected)
    g = torch.randn_like(found)
    grads = [torch.autograd.grad(out, x, g)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)
    back = apply_rotary(found.detach(), cos, sin, given, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x.detach())


@LAYOUTS
def test_rotary_packed(interleaved, device):
    """Every sequence by its own positions; rows past the last stand at position 0."""
    x = torch.randn(10, 3, 12, device=device, requires_grad=True)
    cos, sin = tables(device=device)
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    offsets = torch.tensor([2, 1, 5], dtype=torch.int32, device=device)
    found = apply_rotary_emb(
        x, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=5
    )
    places = torch.tensor([2, 3, 4, 5, 5, 6, 7, 8, 9, 0], device=device)
    expected = apply_rotary_emb_torch(x[None], cos[places], sin[places], interleaved)[0]
    torch.testing.assert_close(found, expected)
    g = torch.randn_like(found)
    grads = [torch.autograd.grad(out, x, g)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)
    whole = apply_rotary_emb(x, cos, sin, interleaved, cu_seqlens=cu[[0, 3]])
    torch.testing.assert_close(whole[:9], apply_rotary_emb(x[None, :9], cos, sin, interleaved)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("table_dtype", [torch.float32, None, torch.float16])
def test_rotary_dtypes(dtype, table_dtype):
    x = torch.randn(2, 5, 3, 8, dtype=dtype)
    cos, sin = tables(dtype=table_dtype or dtype)
    found = apply_rotary_emb(x, cos, sin)
    expected = apply_rotary_emb_torch(x.double(), cos[:5].double(), sin[:5].double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=3e-2)


def test_rotary_in_place_and_strided():
    cos, sin = tables()
    x = torch.randn(2, 3, 12, 5).permute(0, 3, 1, 2)  # last stride 5
    expected = apply_rotary_emb_torch(x, cos[:5], sin[:5])
    torch.testing.assert_close(apply_rotary_emb_func(x, cos, sin), expected)
    y = x.clone()
    assert apply_rotary(y, cos, sin, inplace=True) is y
    torch.testing.assert_close(y, expected)
    assert apply_rotary_emb(x, cos, sin, inplace=True) is x
    torch.testing.assert_close(x, expected)


def reference_qkv(qkv, heads_q, cos, sin, cos_k, sin_k, interleaved):
    heads_k = (qkv.shape[2] - heads_q) // 2
    q, k, v = qkv.split((heads_q, heads_k, heads_k), 2)
    n = qkv.shape[1]
    q = apply_rotary_emb_torch(q, cos[:n], sin[:n], interleaved)
    k = apply_rotary_emb_torch(k, cos_k[:n], sin_k[:n], interleaved)
    return torch.cat((q, k, v), 2)


@LAYOUTS
@pytest.mark.parametrize("heads", ["equal", "grouped"])
@pytest.mark.parametrize("own_tables", [False, True])
def test_rotary_packed_heads(interleaved, heads, own_tables):
    heads_q, heads_k = (3, 3) if heads == "equal" else (4, 2)
    given = torch.randn(2, 5, heads_q + 2 * heads_k, 12, requires_grad=True)
    cos, sin = tables()
    cos_k, sin_k = tables() if own_tables else (cos, sin)
    expected = reference_qkv(given, heads_q, cos, sin, cos_k, sin_k, interleaved)
    qkv = given * 1
    if heads == "equal":
        qkv = qkv.unflatten(2, (3, 3))
    keys = (cos_k, sin_k) if own_tables else (None, None)
    number = heads_q if heads == "grouped" else None
    found = apply_rotary_emb_qkv_(qkv, cos, sin, *keys, interleaved=interleaved, num_heads_q=number)
    assert found is qkv
    found = found.reshape(expected.shape)
    torch.testing.assert_close(found, expected)
    g = torch.randn_like(expected)
    grads = [torch.autograd.grad(out, given, g)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_rotary_kv():
    kv = torch.randn(2, 5, 2, 3, 12)
    cos, sin = tables()
    expected = torch.stack([apply_rotary_emb_torch(kv[:, :, 0], cos[:5], sin[:5]), kv[:, :, 1]], 2)
    assert apply_rotary_emb_kv_(kv, cos, sin) is kv
    torch.testing.assert_close(kv, expected)


@LAYOUTS
@pytest.mark.parametrize("scale_base", [None, 16.0])
def test_rotary_embedding(interleaved, scale_base):
    """Scores of rotated q and k depend on the distance alone; xPos' keys undo the queries' scale
    at distance 0."""
    rotary = RotaryEmbedding(8, interleaved=interleaved, scale_base=scale_base)
    assert not rotary.state_dict()
    row = torch.randn(1, 1, 3, 1, 8)
    q, k, v = rotary(row.expand(1, 7, 3, 1, 8).clone()).unbind(2)
    scores = torch.einsum("bihd,bjhd->ij", q, k)
    if scale_base is None:
        torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:])
    torch.testing.assert_close(scores.diagonal(), (row[0, 0, 0] @ row[0, 0, 1].T)[0].expand(7))
    assert torch.equal(v, row[:, :, 2].expand(1, 7, 1, 8))
    # q apart from kv, and a decoding step at a position of its own.
    one, kv = rotary(
        row[:, :, 0].clone(), row[:, :, 1:].clone(), seqlen_offset=torch.tensor([4]), max_seqlen=7
    )
    torch.testing.assert_close(one[:, 0], q[:, 4])
    torch.testing.assert_close(kv[:, 0, 0], k[:, 4])


def test_rotary_embedding_tables_follow():
    rotary = RotaryEmbedding(4, base=100.0)
    rotary(torch.randn(1, 3, 3, 1, 4))
    first = rotary._cos_cached
    rotary(torch.randn(1, 2, 3, 1, 4))
    assert rotary._cos_cached is first and first.shape == (3, 2)
    rotary(torch.randn(1, 2, 3, 1, 4), seqlen_offset=4)
    assert rotary._cos_cached.shape == (6, 2)
    rotary(torch.randn(1, 2, 3, 1, 4).bfloat16())
    assert rotary._cos_cached.dtype == torch.bfloat16
    angles = torch.outer(torch.arange(2.0), torch.tensor([1.0, 0.1]))
    torch.testing.assert_close(rotary._cos_cached.float(), angles.cos().bfloat16().float())
    rounded = RotaryEmbedding(4, base=10001.0).bfloat16()
    rounded(torch.randn(1, 50, 3, 1, 4))
    exact = (49 * 10001.0**-0.5 * torch.ones(())).cos()
    torch.testing.assert_close(rounded._cos_cached[49, 1], exact)


def test_xpos_keys_of_a_cache_keep_their_meaning():
    """Each step makes the tables longer: scores with keys rotated earlier are those of one pass."""
    rotary, whole = (RotaryEmbedding(8, scale_base=4.0) for _ in range(2))
    qkv = torch.randn(1, 12, 3, 1, 8)
    q, k, _ = whole(qkv.clone()).unbind(2)
    expected = torch.einsum("bihd,bjhd->ij", q, k).tril()
    queries, keys = [], []
    for first, last in ((0, 5), (5, 6), (6, 11), (11, 12)):
        one, kv = rotary(
            qkv[:, first:last, 0].clone(), qkv[:, first:last, 1:].clone(), seqlen_offset=first
        )
        queries.append(one)
        keys.append(kv[:, :, 0])
    found = torch.einsum("bihd,bjhd->ij", torch.cat(queries, 1), torch.cat(keys, 1)).tril()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rotary_embedding_reaches_what_it_must():
    """max_seqlen is a hint where the offset is an int; where only the device knows it is needed."""
    rotary = RotaryEmbedding(8)
    x = torch.randn(2, 3, 3, 1, 8)
    assert torch.equal(
        rotary(x.clone(), seqlen_offset=4, max_seqlen=2), rotary(x.clone(), seqlen_offset=4)
    )
    offset = torch.tensor([4, 1])
    with pytest.raises(ValueError, match="max_seqlen must be given"):
        RotaryEmbedding(8)(x.clone(), seqlen_offset=offset)


@LAYOUTS
@pytest.mark.parametrize("offset", [3, "tensor"])
def test_rotary_jvp_and_vmap(interleaved, offset):
    """A rotation is linear: its tangent is the tangent rotated; and every mapped form is a loop's
    result."""
    cos, sin = tables(dtype=torch.float64)
    offsets = torch.tensor([1, 4], dtype=torch.int32) if offset == "tensor" else offset
    x, dx = torch.randn(2, 3, 2, 5, 3, 12, dtype=torch.float64)[:, 0]

    def rotate(x, cos=cos, sin=sin, offsets=offsets):
        return apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)

    out, tangent = torch.func.jvp(rotate, (x,), (dx,))
    assert torch.equal(out, rotate(x)) and torch.equal(tangent, rotate(dx))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, dx)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(rotate(dual)).tangent, tangent)
    many = torch.randn(4, 2, 5, 3, 12, dtype=torch.float64)
    expected = torch.stack([rotate(each) for each in many])
    assert torch.equal(torch.vmap(rotate)(many), expected)
    assert torch.equal(torch.vmap(rotate, 1, 1)(many.transpose(0, 1)), expected.transpose(0, 1))
    more = cos.expand(4, *cos.shape).clone(), sin.expand(4, *sin.shape).clone()
    assert torch.equal(torch.vmap(rotate)(many, *more), expected)
    assert torch.equal(
        torch.vmap(lambda x: apply_rotary(x, cos, sin))(many)[1], apply_rotary(many[1], cos, sin)
    )
    assert torch.vmap(rotate)(many[:0]).shape == many[:0].shape
    # Over gradients: the mapped backward pass.
    per_entry = torch.vmap(torch.func.grad(lambda x: rotate(x).pow(3).sum()))(many)
    leaf = many.clone().requires_grad_()
    rotate_all = torch.stack([rotate(each) for each in leaf]).pow(3).sum()
    torch.testing.assert_close(per_entry, torch.autograd.grad(rotate_all, leaf)[0])
    if offset == "tensor":
        lots = torch.tensor([[1, 4], [0, 0], [5, 2], [6, 1]], dtype=torch.int32)
        found = torch.vmap(lambda x, o: rotate(x, offsets=o))(many, lots)
        each = [rotate(x, offsets=o) for x, o in zip(many, lots, strict=True)]
        assert torch.equal(found, torch.stack(each))


def test_rotary_gradcheck():
    """Second derivatives and forward mode over reverse."""
    cos, sin = tables(dtype=torch.float64)
    x = torch.randn(1, 2, 1, 8, dtype=torch.float64, requires_grad=True)

    def rotate(x):
        return apply_rotary_emb(x, cos, sin).sin()

    torch.autograd.gradcheck(rotate, x, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(rotate, x, check_fwd_over_rev=True)


def test_rotate_half():
    x = torch.arange(4.0)
    assert rotate_half(x).tolist() == [-2, -3, 0, 1]
    assert rotate_half(x, True).tolist() == [-1, 0, -3, 2]


def test_rotary_compiles():
    torch.compiler.reset()
    cos, sin = tables()
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x: apply_rotary_emb(x, cos, sin).square().sum(), fullgraph=True, backend="aot_eager"
    )
    compiled(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize(
    "change, error, word",
    [
        ({"x": torch.randn(5, 3, 8)}, ValueError, "x must have shape"),
        ({"cos": torch.ones(11, 5)}, ValueError, "cos and sin"),
        ({"sin": 1.0}, TypeError, "sin must be a torch.Tensor"),
        ({"seqlen_offsets": 7}, ValueError, "seqlen_offsets"),
        ({"seqlen_offsets": -1}, ValueError, "seqlen_offsets must be >= 0, got -1"),
        ({"seqlen_offsets": 1.5}, TypeError, "seqlen_offsets must be an int"),
        ({"seqlen_offsets": torch.ones(3, dtype=torch.int32)}, ValueError, "seqlen_offsets"),
        ({"cu_seqlens": torch.ones(3, dtype=torch.int32)}, ValueError, "x must have shape"),
    ],
)
def test_rotary_refuses(change, error, word):
    cos, sin = tables()
    arguments = {"x": torch.randn(2, 5, 3, 8), "cos": cos, "sin": sin} | change
    with pytest.raises(error, match=word):
        apply_rotary(**arguments)
