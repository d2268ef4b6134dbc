# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face GPT-2 (and a GQA model) through our registered name against eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flash_attn.integrations.transformers import (  # noqa: E402
    attention_forward,
    make_mask,
    register,
)


@pytest.fixture(scope="module")
def name():
    return register()


def gpt2(implementation, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    settings = sizes | dropout | tokens | changes
    config = transformers.GPT2Config(**settings, attn_implementation=implementation)
    return transformers.GPT2LMHeadModel(config)


def llama(implementation):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=None,
        attn_implementation=implementation,
    )
    return transformers.LlamaForCausalLM(config)


def sliding(implementation):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        sliding_window=5,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=None,
        attn_implementation=implementation,
    )
    return transformers.MistralForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama-gqa": llama, "mistral-window": sliding}


def padding(kind):
    """A (3, 17) mask and the tokens it belongs to."""
    mask = torch.ones(3, 17, dtype=torch.int64)
    if kind == "right":
        mask[0, 12:], mask[2, 3:] = 0, 0
    elif kind == "left":
        mask[0, :5], mask[2, :14] = 0, 0
    return torch.randint(1, 60, (3, 17)), mask


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["none", "right", "left"])
def test_hf_logits_and_gradients(model, kind, name):
    """Where a token is real the logits agree, and so do all gradients of a loss over real
    tokens."""
    tokens, mask = padding(kind)
    found = []
    for implementation in ("eager", name):
        net = MODELS[model](implementation)
        args = {} if kind == "none" else {"attention_mask": mask}
        logits = net(tokens, **args).logits
        real = logits[mask.bool()]
        torch.nn.functional.cross_entropy(real, tokens[mask.bool()]).backward()
        found.append((real, [p.grad for p in net.parameters()]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    for a, b in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float", "per-head"])
def test_hf_four_dimensional_masks(kind, name):
    tokens, _ = padding("none")
    seen = torch.ones(17, 17).tril().bool() & (torch.rand(3, 1, 17, 17) < 0.8)
    seen |= torch.eye(17, dtype=torch.bool)
    if kind == "per-head":
        seen = seen & (torch.rand(3, 4, 17, 17) < 0.9) | torch.eye(17, dtype=torch.bool)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = gpt2("eager")(tokens, attention_mask=additive).logits
    given = seen if kind == "bool" else additive
    found = gpt2(name)(tokens, attention_mask=given).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_hf_generation(model, kind, cache, name):
    """Greedy decoding through the KV cache gives eager's tokens."""
    tokens, mask = padding(kind)
    made = [
        MODELS[model](implementation)
        .eval()
        .generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            cache_implementation=cache if cache == "static" else None,
        )
        for implementation in ("eager", name)
    ]
    assert torch.equal(*made)


def test_hf_chunked_prefill(name):
    """A prompt fed in pieces through one cache: queries stand at the end of the keys."""
    tokens, _ = padding("none")
    net = gpt2(name).eval()
    with torch.no_grad():
        whole = net(tokens, use_cache=False).logits
        first = net(tokens[:, :6], use_cache=True)
        cache = first.past_key_values
        rest = net(tokens[:, 6:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=1e-4, atol=1e-5)


def test_hf_packed_positions(name):
    """Two sequences in one row, told by position_ids alone."""
    tokens = torch.randint(1, 60, (1, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    found = gpt2(name).eval()(tokens, position_ids=positions, use_cache=False).logits
    expected = gpt2("eager").eval()(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_hf_dropout_in_training_only(name):
    """Attention dropout acts in training, repeats under a seed, and keeps the mean."""
    tokens, _ = padding("none")
    net = gpt2(name, attn_pdrop=0.3)
    torch.manual_seed(1)
    a = net(tokens).logits
    torch.manual_seed(1)
    b = net(tokens).logits
    assert torch.equal(a, b) and not torch.equal(a, net(tokens).logits)
    net.eval()
    assert torch.equal(net(tokens).logits, net(tokens).logits)
    torch.testing.assert_close(net(tokens).logits, gpt2("eager").eval()(tokens).logits)


def test_hf_cross_attention(name):
    tokens, mask = padding("right")
    states = torch.randn(3, 17, 32)
    found = [
        gpt2(implementation, add_cross_attention=True)(
            tokens, encoder_hidden_states=states, encoder_attention_mask=mask
        ).logits
        for implementation in ("eager", name)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_hf_autocast_and_checkpointing(name):
    tokens, _ = padding("none")
    net = gpt2(name, attn_pdrop=0.2)
    net.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16):
        net(tokens, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_hf_masks_are_cheap(name):
    """None without padding, two dimensions with it: nothing of size queries x keys."""
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 9}
    assert make_mask(**sizes, q_offset=4) is None
    pad = torch.ones(2, 9, dtype=torch.bool)
    pad[0, :2] = False
    assert make_mask(**sizes, q_offset=4, attention_mask=pad).shape == (2, 9)
    # Queries that do not stand at the end of the keys (a static cache) need the whole mask.
    assert make_mask(**sizes, q_offset=1).shape == (2, 1, 5, 9)


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


def test_hf_compile(name):
    torch.compiler.reset()
    tokens, _ = padding("none")
    net = gpt2(name).eval()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(tokens, use_cache=False).logits
        torch.testing.assert_close(found, net(tokens, use_cache=False).logits)
