# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face models through our own registered name against eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import (  # noqa: E402
    GENERATIONS,
    MODELS,
    batch,
    build,
    check_bf16,
    check_exact,
    generate,
)
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from flash_attn.integrations.transformers import (  # noqa: E402
    attention_forward,
    make_mask,
    register,
)

KINDS = ["none", "right", "left", "packed"]
CASES = [(model, kind) for model in MODELS for kind in KINDS if (model, kind) != ("bert", "packed")]


@pytest.fixture(scope="module")
def name():
    return register()


@pytest.mark.parametrize("model, kind", CASES)
def test_hf_logits_and_gradients(model, kind, name):
    check_exact(model, kind, name)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["none", "left"])
def test_hf_error_in_bf16(model, kind, name, device):
    check_bf16(model, kind, name, device)


@pytest.mark.parametrize("kind", ["bool", "float", "per-head"])
def test_hf_four_dimensional_masks(kind, name):
    tokens, _ = batch("none")
    seen = torch.ones(17, 17).tril().bool() & (torch.rand(3, 1, 17, 17) < 0.8)
    seen |= torch.eye(17, dtype=torch.bool)
    if kind == "per-head":
        seen = seen & (torch.rand(3, 4, 17, 17) < 0.9) | torch.eye(17, dtype=torch.bool)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = build("gpt2", "eager")(tokens, attention_mask=additive).logits
    given = seen if kind == "bool" else additive
    found = build("gpt2", name)(tokens, attention_mask=given).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model, kind, cache", GENERATIONS)
def test_hf_generation(model, kind, cache, name, device):
    """Greedy decoding in fp32 through the KV cache gives eager's tokens."""
    tokens, arguments = batch(kind, device)
    made = [
        generate(build(model, implementation, device=device), tokens, arguments, cache)
        for implementation in ("eager", name)
    ]
    assert torch.equal(*made)


def test_hf_chunked_prefill(name):
    """A prompt fed in pieces through one cache: queries stand at the end of the keys."""
    tokens, _ = batch("none")
    net = build("gpt2", name).eval()
    with torch.no_grad():
        whole = net(tokens, use_cache=False).logits
        first = net(tokens[:, :6], use_cache=True)
        cache = first.past_key_values
        rest = net(tokens[:, 6:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spelling", ["max_length", "max_seqlen"])
def test_hf_packed_lengths(spelling, name):
    """Packed rows by their lengths, without a mask, under either name of the longest one."""
    q = torch.randn(1, 4, 12, 16)
    k, v = (torch.randn(1, 2, 12, 16) for _ in "kv")
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    lengths |= {f"{spelling}_q": torch.tensor(7), f"{spelling}_k": torch.tensor(7)}
    options = {"scaling": 0.3, "sliding_window": 4, "is_causal": True}
    found, _ = attention_forward(torch.nn.Module(), q, k, v, None, **options, **lengths)
    parts = [
        attention_forward(torch.nn.Module(), *(x[:, :, rows] for x in (q, k, v)), None, **options)
        for rows in (slice(0, 5), slice(5, 12))
    ]
    torch.testing.assert_close(found, torch.cat([part for part, _ in parts], 1))


def test_hf_dropout_in_training_only(name):
    """Attention dropout acts in training, repeats under a seed, and keeps the mean."""
    tokens, _ = batch("none")
    net = build("gpt2", name, attn_pdrop=0.3)
    torch.manual_seed(1)
    a = net(tokens).logits
    torch.manual_seed(1)
    b = net(tokens).logits
    assert torch.equal(a, b) and not torch.equal(a, net(tokens).logits)
    net.eval()
    assert torch.equal(net(tokens).logits, net(tokens).logits)
    torch.testing.assert_close(net(tokens).logits, build("gpt2", "eager").eval()(tokens).logits)


def test_hf_cross_attention(name):
    tokens, arguments = batch("right")
    mask = arguments["attention_mask"]
    states = torch.randn(3, 17, 32)
    found = [
        build("gpt2", implementation, add_cross_attention=True)(
            tokens, encoder_hidden_states=states, encoder_attention_mask=mask
        ).logits
        for implementation in ("eager", name)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_hf_autocast_and_checkpointing(name):
    tokens, _ = batch("none")
    net = build("gpt2", name, attn_pdrop=0.2)
    net.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16):
        net(tokens, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_hf_masks_are_cheap(name):
    """None without padding, nothing of size queries x keys with it or with a window."""
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 9}
    assert make_mask(**sizes, q_offset=4) is None
    pad = torch.ones(2, 9, dtype=torch.bool)
    pad[0, :2] = False
    whole = torch.ones(2, 9, dtype=torch.bool)
    assert make_mask(**sizes, q_offset=4, attention_mask=whole) is None
    assert make_mask(**sizes, q_offset=4, attention_mask=pad).shape == (2, 9)
    # Queries that do not stand at the end of the keys (a static cache) need the whole mask.
    assert make_mask(**sizes, q_offset=1).shape == (2, 1, 5, 9)
    # A window that reaches every key is none; a shorter one is a number where a token is real.
    sizes |= {"q_offset": 4, "mask_function": sliding_window_causal_mask_function(9)}
    assert make_mask(**sizes) is None
    assert make_mask(**sizes, attention_mask=pad).dim() == 4
    sizes["mask_function"] = sliding_window_causal_mask_function(4)
    assert make_mask(**sizes).tolist() == [[[[4]]]]
    padded = make_mask(**sizes, attention_mask=pad)
    assert padded[:, 0, 0].tolist() == [[0, 0, *[4] * 7], [4] * 9]
    sizes["mask_function"] = and_masks(sizes["mask_function"], causal_mask_function)
    assert make_mask(**sizes).shape == (2, 1, 5, 9)


def test_hf_padding_of_an_unmasked_pass(name):
    """It says all there is to say, also to a layer that does not say that it is not causal."""
    pad = torch.ones(2, 9, dtype=torch.bool)
    pad[0, 6:] = False
    sizes = {"batch_size": 2, "q_length": 9, "kv_length": 9}
    mask = make_mask(**sizes, mask_function=bidirectional_mask_function, attention_mask=pad)
    assert mask.shape == (2, 1, 1, 9)
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in "qkv")
    found, _ = attention_forward(torch.nn.Module(), q, k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, pad[:, None, None])
    torch.testing.assert_close(found, expected.transpose(1, 2))


# Queries, keys, and how many tokens came before the first query and the first key.
@pytest.mark.parametrize("sizes", [(9, 9, 0, 0), (3, 9, 6, 0), (3, 7, 8, 4), (1, 4, 10, 7)])
@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_hf_windows(sizes, told, name):
    """A window by the mask, whether or not the layer says it too; whole, or a step of a cache."""
    names = ("q_length", "kv_length", "q_offset", "kv_offset")
    sizes = dict(zip(names, sizes, strict=True)) | {"batch_size": 2}
    q, k, v = (torch.randn(2, 3, sizes[x], 16) for x in ("q_length", "kv_length", "kv_length"))
    pad = torch.ones(2, sizes["kv_offset"] + sizes["kv_length"], dtype=torch.bool)
    pad[0, : sizes["kv_offset"] + 2] = False
    sizes["mask_function"] = sliding_window_causal_mask_function(4)
    module = torch.nn.Module()
    module.is_causal = True
    for padding in (None, pad):
        mask = make_mask(**sizes, attention_mask=padding)
        whole = sdpa_mask(**sizes, attention_mask=padding, allow_is_causal_skip=False)
        window = {"sliding_window": 4} if told else {}
        found, _ = attention_forward(module, q, k, v, mask, **window)
        expected, _ = attention_forward(module, q, k, v, whole)
        assert mask is None or mask.numel() <= 2 * sizes["kv_length"]
        seen = whole.any(-1)[:, 0]
        torch.testing.assert_close(found[seen], expected[seen])


def test_hf_sinks_softcap_and_bias(name):
    """What other models pass: s_aux, softcap, a position bias, a window."""
    q = torch.randn(2, 4, 7, 16)
    k, v = (torch.randn(2, 2, 7, 16) for _ in "kv")
    module = torch.nn.Module()
    module.is_causal = True
    bias = torch.randn(1, 4, 7, 7)
    pad = torch.ones(2, 7, dtype=torch.bool)
    pad[0, :2] = False
    sinks = torch.randn(4)
    out, weights = attention_forward(
        module, q, k, v, pad, s_aux=sinks, softcap=3.0, position_bias=bias, sliding_window=3
    )
    i = torch.arange(7)
    seen = (i[:, None] >= i) & (i[:, None] - i < 3) & pad[:, None, None, :]
    s = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) / 4
    s = (3 * torch.tanh(s / 3) + bias).masked_fill(~seen, float("-inf"))
    s = torch.cat([s, sinks[None, :, None, None].expand(2, 4, 7, 1)], 3).softmax(3)[..., :7]
    expected = torch.einsum("bhij,bhjd->bihd", s, v.repeat_interleave(2, 1))
    torch.testing.assert_close(out, expected)
    assert weights is None


@pytest.mark.parametrize("wrong", ["my_flash", "sdpa2", "owner/kernel", "", "paged|x"])
def test_hf_names(wrong):
    with pytest.raises(ValueError, match="name"):
        register(wrong)
    with pytest.raises(TypeError, match="name must be a str, got int"):
        register(5)


@pytest.mark.parametrize("model, kind", [("gpt2", "left"), ("gemma2-softcap", "packed")])
def test_hf_compile(model, kind, name):
    """A whole model, its masks made while tracing, forward and backward without a graph break."""
    torch.compiler.reset()
    tokens, arguments = batch(kind)
    nets = [build(model, name) for _ in range(2)]
    calls = [torch.compile(nets[0], fullgraph=True, backend="aot_eager"), nets[1]]
    logits = [call(tokens, **arguments | {"use_cache": False}).logits for call in calls]
    real = arguments.get("attention_mask", torch.ones_like(tokens)).bool()
    torch.testing.assert_close(logits[0][real], logits[1][real])
    for out in logits:
        out[real].square().mean().backward()
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
