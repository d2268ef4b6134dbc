# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention 2's private functions and its extension module: the same bits as the public
functions and their autograd, by the calls that clients make."""

import inspect

import pytest
import torch

import flash_attn_2_cuda
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_interface as interface

CU = [0, 5, 5, 12]


def dense(device="cpu", dtype=torch.float32):
    q = torch.randn(2, 6, 4, 8, device=device, dtype=dtype)
    k, v = (torch.randn(2, 9, 2, 8, device=device, dtype=dtype) for _ in "kv")
    return q, k, v


def packed(device="cpu", dtype=torch.float32):
    q = torch.randn(12, 4, 8, device=device, dtype=dtype)
    k, v = (torch.randn(12, 2, 8, device=device, dtype=dtype) for _ in "kv")
    return q, k, v, torch.tensor(CU, dtype=torch.int32, device=device)


# softmax_scale, causal, window left and right, softcap, alibi
OPTIONS = [
    pytest.param(0.3, False, -1, -1, 0.0, False, id="plain"),
    pytest.param(None, True, -1, -1, 0.0, True, id="causal-alibi"),
    pytest.param(0.5, True, 3, 0, 0.0, False, id="window"),
    pytest.param(0.5, False, 2, 1, 5.0, False, id="softcap"),
]


def public(function, inputs, options, slopes, *lengths, **others):
    scale, causal, left, right, cap, _ = options
    return function(
        *inputs,
        *lengths,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, right),
        softcap=cap,
        alibi_slopes=slopes,
        return_attn_probs=True,
        **others,
    )


@pytest.mark.parametrize("options", [p.values for p in OPTIONS], ids=[p.id for p in OPTIONS])
def test_private_functions_dense(options, device):
    q, k, v = (x.requires_grad_() for x in dense(device, torch.float16))
    slopes = torch.rand(4, device=device) if options[-1] else None
    expected = public(flash_attn_func, (q, k, v), options, slopes, deterministic=True)
    dout = torch.randn_like(expected[0])
    wanted = torch.autograd.grad(expected[0], (q, k, v), dout)
    scale, causal, left, right, cap, _ = options
    out, lse, probs, rng = interface._flash_attn_forward(
        q, k, v, 0.0, scale, causal, left, right, cap, slopes, False
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert probs.numel() == 0 and rng.shape == (2,) and not out.requires_grad
    grads = [torch.empty_like(x) for x in (q, k, v)]
    delta = interface._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, 0.0, scale, causal, left, right, cap, slopes, True
    )
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want)
    torch.testing.assert_close(delta, (out.float() * dout.float()).sum(-1).transpose(1, 2))


@pytest.mark.parametrize("options", [p.values for p in OPTIONS], ids=[p.id for p in OPTIONS])
def test_private_functions_packed(options, device):
    q, k, v, cu = packed(device, torch.float16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    slopes = torch.rand(4, device=device) if options[-1] else None
    expected = public(flash_attn_varlen_func, (q, k, v), options, slopes, cu, cu, 7, 7)
    dout = torch.randn_like(expected[0])
    wanted = torch.autograd.grad(expected[0], (q, k, v), dout)
    scale, causal, left, right, cap, _ = options
    numbers = {
        "dropout_p": 0,
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": cap,
        "alibi_slopes": slopes,
    }
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 7, "max_seqlen_k": 7}
    out, lse, _, _ = interface._flash_attn_varlen_forward(
        q=q, k=k, v=v, **lengths, **numbers, return_softmax=False
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert lse.shape == (4, 12)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_varlen_backward(
        dout=dout,
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_lse=lse,
        dq=grads[0],
        dk=grads[1],
        dv=grads[2],
        **lengths,
        **numbers,
        deterministic=False,
    )
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want)


def test_private_functions_dropout(device):
    """What was drawn comes back as rng_state, S_dmask shows it, and the backward repeats it."""
    q, k, v = dense(device)
    rest = (None, True, -1, -1, 0.0, None)
    torch.manual_seed(3)
    out, lse, probs, rng = interface._flash_attn_forward(q, k, v, 0.4, *rest, True)
    torch.manual_seed(3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_attn_func(*leaves, dropout_p=0.4, causal=True, return_attn_probs=True)
    assert all(torch.equal(a, b) for a, b in zip((out, lse, probs), expected, strict=True))
    assert probs.shape == (2, 4, 6, 9) and rng.dtype == torch.int64 and rng.device == q.device
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected[0], leaves, dout)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    arguments = (dout, q, k, v, out, lse, *grads, 0.4, *rest, False)
    interface._flash_attn_backward(*arguments, rng_state=rng)
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want)
    with pytest.raises(ValueError, match="rng_state"):
        interface._flash_attn_backward(*arguments)


def test_diffusers_asks_for_lse_with_a_tiny_dropout():
    """Its p of 1e-30 rounds to none: nothing is dropped, nothing quadratic is made."""
    q, k, v = dense()
    out, lse, probs, rng = interface._wrapped_flash_attn_forward(
        q, k, v, 1e-30, 8**-0.5, False, -1, -1, 0.0, None, True
    )
    expected = flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and probs.numel() == 0
    grads = [torch.empty_like(x) for x in (q, k, v)]
    permuted = lse.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    interface._wrapped_flash_attn_backward(
        out, q, k, v, out, permuted, *grads,
        1e-30, 8**-0.5, False, -1, -1, 0.0, None, False, rng,
    )  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(flash_attn_func(*leaves), leaves, out)
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want)


def test_ring_merges_blocks():
    """Two passes over halves of the keys, merged by lse as ring attention does, then the backward
    of each half from the merged out and lse; an empty half (-inf) counts for nothing."""
    q, k, v = dense(dtype=torch.float64)
    forward, backward = interface._flash_attn_forward, interface._flash_attn_backward
    names = inspect.getfullargspec(forward)
    assert inspect.isfunction(forward) and "window_size" not in names.args
    call = {"dropout_p": 0, "softmax_scale": 0.4, "causal": False, "softcap": 0.0}
    call |= {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}
    out, lse = 0, None
    for part in (slice(0, 4), slice(4, 9), slice(9, 9)):
        block, block_lse, *_ = forward(
            q=q, k=k[:, part], v=v[:, part], return_softmax=False, **call
        )
        if lse is None:
            out, lse = block, block_lse
            continue
        weight = torch.sigmoid(block_lse - lse).transpose(1, 2)[..., None]
        out = out - weight * (out - block)
        lse = torch.logaddexp(lse, block_lse)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_attn_func(*leaves, softmax_scale=0.4, return_lse=True)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected[0], leaves, dout)
    dq = torch.zeros_like(q)
    for part in (slice(0, 4), slice(4, 9)):
        pieces = [torch.empty_like(x) for x in (q, k[:, part], v[:, part])]
        names = dict(zip(("dq", "dk", "dv"), pieces, strict=True))
        inputs = {"dout": dout, "q": q, "k": k[:, part], "v": v[:, part], "out": out}
        backward(softmax_lse=lse, deterministic=False, **inputs, **names, **call)
        dq += pieces[0]
        torch.testing.assert_close(pieces[1], wanted[1][:, part])
        torch.testing.assert_close(pieces[2], wanted[2][:, part])
    torch.testing.assert_close(dq, wanted[0])


def test_extension_functions_by_position():
    q, k, v = dense()
    out, lse, probs, rng = flash_attn_2_cuda.fwd(
        q, k, v, None, None, 0.0, 0.3, True, -1, 0, 0.0, False, None
    )
    expected = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    place = torch.empty_like(q)
    again = flash_attn_2_cuda.fwd(q, k, v, place, None, 0.0, 0.3, True, -1, 0, 0.0, False, None)
    assert again[0] is place and torch.equal(place, out)
    dout = torch.randn_like(out)
    made = flash_attn_2_cuda.bwd(
        dout,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        None,
        None,
        0.0,
        0.3,
        True,
        -1,
        0,
        0.0,
        False,
        None,
        rng,
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(
        flash_attn_func(*leaves, softmax_scale=0.3, causal=True), leaves, dout
    )
    for found, want in zip(made[:3], wanted, strict=True):
        torch.testing.assert_close(found, want)
    assert made[3].shape == lse.shape


def test_extension_packed_functions_by_position():
    q, k, v, cu = packed()
    used = torch.tensor([4, 0, 7], dtype=torch.int32)
    arguments = (q, k, v, None, cu, cu, used, None, None, None, 7, 7)
    numbers = (0.0, 0.3, False, True, -1, 0, 0.0, False, None)
    out, lse, *_ = flash_attn_2_cuda.varlen_fwd(*arguments, *numbers)  # 21 arguments
    again, *_ = flash_attn_2_cuda.varlen_fwd(*arguments, *numbers, 0)  # 22
    expected = flash_attn_varlen_func(
        q, k, v, cu, cu, 7, 7, softmax_scale=0.3, causal=True, seqused_k=used, return_lse=True
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(again, out)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole, lse = flash_attn_varlen_func(*leaves, cu, cu, 7, 7, causal=True, return_lse=True)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(whole, leaves, dout)
    places = [torch.empty_like(x) for x in (q, k, v)]
    made = flash_attn_2_cuda.varlen_bwd(
        dout, q, k, v, whole, lse, *places, cu, cu, None, 7, 7,
        0.0, 8**-0.5, False, True, -1, -1, 0.0, True, None, None,
    )  # fmt: skip
    for found, place, want in zip(made[:3], places, wanted, strict=True):
        assert found is place
        torch.testing.assert_close(found, want)


def test_extension_left_padding_and_pages():
    """What the packed forward has beside the public one's, leftpad_k; and pages."""
    q, k, v, cu = packed()
    left = torch.tensor([2, 0, 3], dtype=torch.int32)
    out, *_ = interface._flash_attn_varlen_forward(
        q, k, v, cu, cu, 7, 7, 0.0, None, False, leftpad_k=left
    )
    pieces = [
        flash_attn_func(q[None, a:b], k[None, a + pad : b], v[None, a + pad : b])[0]
        for a, b, pad in zip(CU, CU[1:], left.tolist(), strict=False)
    ]
    torch.testing.assert_close(out, torch.cat(pieces))
    pages = [torch.randn(6, 4, 2, 8) for _ in "kv"]
    table = torch.tensor([[5, 1], [-1, -1], [0, 3]], dtype=torch.int32)
    call = (q, *pages, cu, cu, 7, 7, 0.0, None, True)
    out, lse, *_ = interface._flash_attn_varlen_forward(*call, block_table=table)
    expected = flash_attn_varlen_func(*call, block_table=table, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_extension_kvcache_by_position():
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    caches = [torch.randn(2, 12, 2, 8) for _ in "kv"]
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    own = [x.clone() for x in caches]
    cos = torch.rand(12, 4)
    out, lse = flash_attn_2_cuda.fwd_kvcache(
        q, *own, k, v, lengths, cos, cos, None, None, None, None, None,
        0.3, True, -1, 0, 0.0, False, 0,
    )  # fmt: skip
    expected = flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cos,
        cos,
        lengths,
        softmax_scale=0.3,
        causal=True,
        rotary_interleaved=False,
        return_softmax_lse=True,
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(own, caches, strict=True))


def test_function_classes():
    """`FlashAttnFunc.apply` by position; its last argument turns gradients off."""
    q, k, v = (x.requires_grad_() for x in dense())
    rest = (0.0, 0.3, True, (-1, -1), 0.0, None, False, False)
    out = interface.FlashAttnFunc.apply(q, k, v, *rest, True)
    assert torch.equal(out, flash_attn_func(q, k, v, 0.0, 0.3, True)) and out.requires_grad
    assert not interface.FlashAttnFunc.apply(q, k, v, *rest, False).requires_grad
    q, k, v, cu = packed()
    out = interface.FlashAttnVarlenFunc.apply(q, k, v, cu, cu, 7, 7, *rest, None, True)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, 0.0, 0.3, True))
    qkv = torch.randn(2, 5, 3, 2, 8)
    out = interface.FlashAttnQKVPackedFunc.apply(qkv, *rest, True)
    assert torch.equal(out, flash_attn_func(*qkv.unbind(2), 0.0, 0.3, True))


def test_generator():
    q, k, v = dense()
    made = [
        flash_attn_2_cuda.fwd(
            q, k, v, None, None, 0.5, None, False, -1, -1, 0.0, False,
            torch.Generator().manual_seed(seed),
        )[0]
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_private_functions_compile():
    """Without a graph break, dropout and written gradients included."""
    torch.compiler.reset()
    q, k, v = dense()

    def both(q, k, v, dout):
        rest = (0.25, True, -1, -1, 0.0, None)
        out, lse, _, rng = interface._flash_attn_forward(q, k, v, 0.3, *rest, False)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        interface._flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.3, *rest, False, rng)
        return out, *grads

    results = []
    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(7)
        results.append(call(q, k, v, torch.ones_like(q)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
