# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn.modules.mha: the attention modules and MHA, against plain torch."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.utils.generation import InferenceParams


def plain(q, k, v, causal=False, mask=None):
    """SDPA on (batch, seqlen, heads, head_dim), aligned to the bottom right."""
    rows, columns = q.shape[1], k.shape[1]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    seen = seen.tril(columns - rows) if causal else seen
    seen = seen if mask is None else seen & mask[:, None, None, :]
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(*heads, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def packed(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 20])
def test_alibi_slopes(n):
    """Falling powers of two that start anew at half steps, as the paper says."""
    slopes = get_alibi_slopes(n)
    power = 2 ** (n.bit_length() - 1)
    assert len(slopes) == n
    assert slopes[:power] == pytest.approx([2 ** (-8 * i / power) for i in range(1, power + 1)])
    rest = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (n - power), 2)]
    assert slopes[power:] == pytest.approx(rest)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(causal, device):
    qkv = torch.randn(2, 9, 3, 4, 16, device=device)
    attention = FlashSelfAttention(causal=causal)
    expected = plain(*qkv.unbind(2), causal)
    torch.testing.assert_close(attention(qkv), expected)
    torch.testing.assert_close(FlashSelfAttention()(qkv, causal=causal), expected)
    flat = attention(qkv.flatten(0, 1), cu_seqlens=packed([9, 9], device), max_seqlen=9)
    torch.testing.assert_close(flat, expected.flatten(0, 1))
    mask = torch.arange(9, device=device) < torch.tensor([[9], [5]], device=device)
    found = SelfAttention(causal)(qkv, None, mask)
    torch.testing.assert_close(found, plain(*qkv.unbind(2), causal, mask))


@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention(causal, device):
    q, kv = torch.randn(2, 5, 4, 16, device=device), torch.randn(2, 9, 2, 2, 16, device=device)
    expected = plain(q, *kv.unbind(2), causal)
    torch.testing.assert_close(FlashCrossAttention(causal)(q, kv), expected)
    cu, cu_k = packed([5, 5], device), packed([9, 9], device)
    flat = FlashCrossAttention(causal)(
        q.flatten(0, 1), kv.flatten(0, 1), None, cu, 5, cu_seqlens_k=cu_k, max_seqlen_k=9
    )
    torch.testing.assert_close(flat, expected.flatten(0, 1))
    mask = torch.arange(9, device=device) < torch.tensor([[9], [6]], device=device)
    found = CrossAttention(causal)(q, kv, key_padding_mask=mask)
    torch.testing.assert_close(found, plain(q, *kv.unbind(2), causal, mask))


def test_modules_dropout_in_training_only(device):
    qkv = torch.randn(1, 9, 3, 2, 16, device=device)
    attention = FlashSelfAttention(attention_dropout=0.5)
    assert not torch.equal(attention(qkv), attention(qkv))
    assert torch.equal(attention.eval()(qkv), attention(qkv))


def test_bc53_deterministic_reaches_the_call(monkeypatch):
    """What the constructor takes is what the function gets."""
    seen = {}
    monkeypatch.setattr(
        "flash_attn.modules.mha.flash_attn_func", lambda *_, **options: seen.update(options)
    )
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "deterministic": True}
    slopes = torch.rand(2)
    FlashSelfAttention(**options, attention_dropout=0.2, alibi_slopes=slopes)(
        torch.randn(1, 4, 3, 2, 8)
    )
    assert seen.pop("alibi_slopes") is slopes
    assert seen == {**options, "dropout_p": 0.2, "attn_bias": None}


def rotated(x, base=10000.0, interleaved=False, width=8):
    """Rotary embedding of (batch, seqlen, heads, head_dim) by complex numbers."""
    angles = torch.outer(
        torch.arange(x.shape[1], dtype=torch.float32),
        base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width),
    ).to(x.device)[:, None, :]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)
    a, b = turned.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "gqa": {"num_heads_kv": 2, "causal": True},
    "rotary": {"rotary_emb_dim": 8, "causal": True, "num_heads_kv": 1},
    "rotary-interleaved": {"rotary_emb_dim": 8, "rotary_emb_interleaved": True},
    "dwconv-residual": {"dwconv": True, "return_residual": True},
    "checkpointing": {"checkpointing": True, "qkv_proj_bias": False},
}


def expected_mha(mha, x, kind):
    """MHA from its own parameters in plain torch."""
    qkv = mha.Wqkv(x)
    if mha.dwconv:
        qkv = mha.dwconv_qkv(qkv.transpose(1, 2))[..., :-2].transpose(1, 2)
    heads, heads_k = 4, kind.get("num_heads_kv", 4)
    q, k, v = qkv.unflatten(-1, (heads + 2 * heads_k, 16)).split([heads, heads_k, heads_k], 2)
    if mha.rotary_emb_dim:
        q, k = (rotated(y, interleaved=kind.get("rotary_emb_interleaved", False)) for y in (q, k))
    return mha.out_proj(plain(q, k, v, kind.get("causal", False)).flatten(2))


@pytest.mark.parametrize("name", KINDS)
def test_mha(name, device):
    """Outputs and all gradients, dense and packed."""
    kind = KINDS[name]
    mha = MHA(64, 4, **kind, device=device)
    x = torch.randn(2, 9, 64, device=device, requires_grad=True)
    inputs = [x, *mha.parameters()]
    expected = expected_mha(mha, x, kind)
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    found = mha(x)
    if kind.get("return_residual"):
        found, residual = found
        assert residual is x
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found.square().sum(), inputs), grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    if not mha.dwconv:
        for longest in (9, None):
            flat = mha(x.flatten(0, 1), cu_seqlens=packed([9, 9], device), max_seqlen=longest)
            torch.testing.assert_close(flat, expected.flatten(0, 1))


def test_mha_cross_attention(device):
    mha = MHA(64, 4, num_heads_kv=2, cross_attn=True, return_residual=True, device=device)
    x, y = torch.randn(2, 5, 64, device=device), torch.randn(2, 9, 64, device=device)
    subset = torch.tensor([0, 3], device=device)

    def run(x):
        q = mha.Wq(x).unflatten(-1, (4, 16))
        k, v = mha.Wkv(y).unflatten(-1, (2, 2, 16)).unbind(2)
        return mha.out_proj(plain(q, k, v).flatten(2))

    found, residual = mha(x, x_kv=y)
    torch.testing.assert_close(found, run(x))
    assert residual is y
    torch.testing.assert_close(mha(x, x_kv=y, mixer_subset=subset)[0], run(x[:, subset]))


def test_mha_padding_mask_and_alibi(device):
    """A masked tail changes nothing for the rest; ALiBi acts."""
    mask = torch.arange(9, device=device) < torch.tensor([[9], [5]], device=device)
    x = torch.randn(2, 9, 64, device=device)
    for alibi in (False, True):
        mha = MHA(64, 4, use_alibi=alibi, device=device)
        found = mha(x, key_padding_mask=mask)
        torch.testing.assert_close(found[:1], mha(x[:1]))
        if not alibi:
            torch.testing.assert_close(found[1:, :5], mha(x[1:, :5]))
    assert not torch.equal(mha(x[:1]), MHA(64, 4, device=device)(x[:1]))


GENERATION = {
    "plain": {},
    "gqa-rotary": {"num_heads_kv": 2, "rotary_emb_dim": 8, "rotary_emb_interleaved": True},
    "xpos": {"rotary_emb_dim": 8, "rotary_emb_scale_base": 512},
    "alibi-window": {"use_alibi": True, "window_size": (4, 0)},
}


@pytest.mark.parametrize("name", GENERATION)
@pytest.mark.parametrize("lengths", [False, True], ids=["offset", "lengths"])
def test_mha_generation(name, lengths, device):
    """A prompt, then token by token through the cache, gives what one pass gives."""
    mha = MHA(64, 4, causal=True, layer_idx=3, **GENERATION[name], device=device)
    x = torch.randn(2, 11, 64, device=device)
    expected = mha(x)
    state = InferenceParams(16, 3, batch_size_offset=1)
    if lengths:
        state.lengths_per_sample = torch.zeros(3, dtype=torch.int32, device=device)
    found = []
    for piece in x.split([6, 1, 1, 3], 1):
        found.append(mha(piece, inference_params=state))
        state.seqlen_offset += piece.shape[1]
        if lengths:
            state.lengths_per_sample += piece.shape[1]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    heads = GENERATION[name].get("num_heads_kv", 4)
    assert state.key_value_memory_dict[3].shape == (3, 16, 2, heads, 16)
    state.reset(16, 3)
    torch.testing.assert_close(mha(x, inference_params=state), expected, rtol=1e-4, atol=1e-5)


def test_mha_state_names():
    """Checkpoints of FlashAttention 2's module load."""
    names = {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}
    assert set(MHA(64, 4, rotary_emb_dim=8, use_alibi=True).state_dict()) == names
    names = {"Wq.weight", "Wkv.weight", "dwconv_q.weight", "dwconv_kv.weight", "out_proj.weight"}
    names |= {"dwconv_q.bias", "dwconv_kv.bias"}
    bare = {"qkv_proj_bias": False, "out_proj_bias": False}
    assert set(MHA(64, 4, cross_attn=True, dwconv=True, **bare).state_dict()) == names
    assert MHA(64, 8, num_heads_kv=2).Wqkv.weight.shape == (64 + 2 * 2 * 8, 64)


WRONG = {
    "heads": (lambda: MHA(64, 5), ValueError, "num_heads must divide embed_dim"),
    "heads-kv": (lambda: MHA(64, 4, 3), ValueError, "num_heads_kv must divide num_heads"),
    "packed": (
        lambda: FlashSelfAttention()(torch.zeros(2, 3, 2, 4, 8)),
        ValueError,
        r"qkv must have shape \(…, 3, num_heads, head_dim\)",
    ),
    "slopes": (lambda: get_alibi_slopes(0), ValueError, "nheads"),
    "x_kv": (lambda: MHA(64, 4)(X, x_kv=X), ValueError, "cross_attn=True"),
    "layer": (
        lambda: MHA(64, 4)(X, inference_params=InferenceParams(8, 1)),
        ValueError,
        "layer_idx",
    ),
    "cross-rotary": (
        lambda: MHA(64, 4, cross_attn=True, rotary_emb_dim=8),
        NotImplementedError,
        "rotary_emb_dim",
    ),
    "mask-packed": (
        lambda: MHA(64, 4)(X[0], cu_seqlens=packed([3], "cpu"), key_padding_mask=X[..., 0] > 0),
        ValueError,
        "exclude",
    ),
    "mask-cache": (
        lambda: MHA(64, 4, layer_idx=0)(
            X, key_padding_mask=X[..., 0] > 0, inference_params=InferenceParams(8, 1)
        ),
        ValueError,
        "excludes",
    ),
    "dwconv-packed": (
        lambda: MHA(64, 4, dwconv=True)(X[0], cu_seqlens=packed([3], "cpu")),
        NotImplementedError,
        "dwconv",
    ),
}
X = torch.zeros(1, 3, 64)


@pytest.mark.parametrize("name", WRONG)
def test_mha_errors(name):
    run, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        run()


def test_mha_autocast(device):
    mha = MHA(64, 4, rotary_emb_dim=8, causal=True, device=device)
    x = torch.randn(2, 9, 64, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out = mha(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), mha(x.detach()).float())
    out.sum().backward()
    torch.testing.assert_close(out.float(), mha(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["gqa", "rotary"])
def test_mha_compile_and_export(name, device):
    torch.compiler.reset()
    mha = MHA(64, 4, **KINDS[name], device=device)
    x = torch.randn(2, 9, 64, device=device)
    expected = mha(x)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    program = torch.export.export(mha, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), expected)


def test_mha_packed_cross_attention_and_causal():
    """Keys have lengths of their own; causal overrides the module's."""
    torch.manual_seed(0)
    cross, own = MHA(24, 3, cross_attn=True), MHA(24, 3)
    x, x_kv = torch.randn(9, 24), torch.randn(12, 24)
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 4, 9], [0, 7, 12]))
    parts = [cross(x[None, :4], x_kv[None, :7])[0], cross(x[None, 4:], x_kv[None, 7:])[0]]
    packed = cross(x, x_kv, cu_seqlens=cu_q, max_seqlen=5, cu_seqlens_k=cu_k, max_seqlen_k=7)
    torch.testing.assert_close(packed, torch.cat(parts))
    seen = own(x[None, :4], causal=True)
    torch.testing.assert_close(seen[:, :1], own(x[None, :1]))
    assert not torch.allclose(seen, own(x[None, :4]))
    with pytest.raises(ValueError, match="cu_seqlens_k needs cross_attn=True and cu_seqlens"):
        own(x, cu_seqlens=cu_q, cu_seqlens_k=cu_k)
    with pytest.raises(ValueError, match="mixer_subset and cu_seqlens exclude"):
        cross(x, x_kv, cu_seqlens=cu_q, mixer_subset=torch.arange(9))
    with pytest.raises(TypeError, match="unknown"):
        own(x[None], unknown=1)


def test_mha_rotary_after_inference_mode():
    module = MHA(24, 3, causal=True, rotary_emb_dim=8).eval()
    x = torch.randn(1, 4, 24)
    with torch.inference_mode():
        expected = module(x)
    out = module(x.requires_grad_())
    out.sum().backward()
    assert torch.equal(out, expected) and x.grad.any()
    with pytest.raises(ValueError, match="dim must be even and positive, got 3"):
        MHA(24, 3, rotary_emb_dim=3)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [{}, {"rotary_emb_scale_base": 32}], ids=["rotary", "xpos"])
def test_mha_cache_of_another_dtype_under_autocast(cache_dtype, kind):
    """The queries are taken to the cache, whose dtype stays."""
    mha = MHA(64, 4, causal=True, layer_idx=0, rotary_emb_dim=8, **kind)
    x = torch.randn(2, 7, 64)
    state = InferenceParams(8, 2)
    state.key_value_memory_dict[0] = mha.allocate_inference_cache(2, 8, cache_dtype)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for piece in x.split([5, 1, 1], 1):
            found.append(mha(piece, inference_params=state))
            state.seqlen_offset += piece.shape[1]
    torch.testing.assert_close(torch.cat(found, 1).float(), mha(x), rtol=0.05, atol=0.02)
    with pytest.raises(TypeError, match="q, k_cache and v_cache must have one dtype"):
        mha.double()(x.double()[:, :1], inference_params=state)


@pytest.mark.parametrize("longest", [None, 1, 3, 100])
def test_mha_packed_rotary_takes_max_seqlen_as_a_hint(longest):
    mha = MHA(64, 4, causal=True, rotary_emb_dim=8)
    x = torch.randn(9, 64)
    expected = torch.cat([mha(x[None, :2])[0], mha(x[None, 2:])[0]])
    found = mha(x, cu_seqlens=packed([2, 7], "cpu"), max_seqlen=longest)
    torch.testing.assert_close(found, expected)
    assert mha(x[:0], cu_seqlens=packed([0, 0], "cpu"), max_seqlen=longest).shape == (0, 64)
