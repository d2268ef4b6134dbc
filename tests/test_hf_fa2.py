# SPDX-License-Identifier: BSD-3-Clause
"""transformers, unmodified, with attn_implementation="flash_attention_2": it finds this package,
accepts its version and signatures, and its models give eager's results."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_fa2 import (  # noqa: E402
    fa_utils,
    flash_attention_2,
    honest_about_the_device,
    import_utils,
)
from hf_models import (  # noqa: E402
    GENERATIONS,
    MODELS,
    batch,
    build,
    check_continuous_batching,
    check_exact,
    generate,
)

import flash_attn  # noqa: E402
from flash_attn import bert_padding  # noqa: E402


@pytest.fixture(scope="module")
def name():
    with flash_attention_2() as name:
        yield name


def exact(model):
    """fp32; fp64 for GPT-2: transformers casts fp32 to the dtype of the layer's first nn.Linear,
    and GPT-2's attention has none."""
    return torch.float64 if model == "gpt2" else torch.float32


def test_bc88_transformers_sees_the_package():
    """The distribution's name and version are what it asks for; only a device may be missing."""
    check = fa_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["pkg_availability_check"]
    assert check() and import_utils.is_flash_attn_greater_or_equal("2.3.3")
    assert import_utils._is_package_available("flash_attn", return_version=True)[1] == "2.8.3"
    import_utils.is_flash_attn_2_available.cache_clear()
    assert import_utils.is_flash_attn_2_available() == torch.cuda.is_available()
    # What FlashAttention 3 and 4 would be asked by: never us.
    assert not import_utils.is_flash_attn_3_available()
    assert not import_utils.is_flash_attn_4_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_bc88_refusal_without_a_device_names_the_device():
    with pytest.raises(ImportError, match="not available on CPU"):
        build("llama-gqa", "flash_attention_2")


def test_loaded_functions_are_ours(name):
    build("llama-gqa", name)
    functions, _ = fa_utils.lazy_import_flash_attention(name)
    assert functions[0] is flash_attn.flash_attn_func
    assert functions[1] is flash_attn.flash_attn_varlen_func
    assert inspect.unwrap(functions[2]) is flash_attn.flash_attn_with_kvcache
    assert functions[3] is bert_padding.pad_input and functions[4] is bert_padding.unpad_input


def test_signatures_announce_every_feature():
    """transformers passes what inspect.signature shows, and nothing else."""
    wanted = {"window_size", "softcap", "block_table", "s_aux"}
    varlen = {"dropout_p", "deterministic", "max_seqlen_q", "max_seqlen_k", "softmax_scale"}
    for function, others in (
        (flash_attn.flash_attn_varlen_func, varlen),
        (flash_attn.flash_attn_with_kvcache, {"cache_seqlens"}),
    ):
        process = fa_utils._lazy_define_process_function(function)
        supported = process.keywords["supports_mapping"]
        # What this transformers asks about; 5.17 knows less than its followers.
        assert all(supported[word] for word in (wanted | others) & set(supported))
        assert wanted - set(supported) <= {"block_table"}
    for function in (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


# BERT's positions do not restart; eager gpt-oss does not look at them (see the collated rows).
CASES = [
    (model, kind)
    for model in MODELS
    for kind in ("none", "right", "left", "packed")
    if kind != "packed" or model not in ("bert", "gpt_oss-sinks")
]


@pytest.mark.parametrize("model, kind", CASES)
def test_fa2_logits_and_gradients(model, kind, name):
    check_exact(model, kind, name, exact(model))


@pytest.mark.parametrize("model, kind, cache", GENERATIONS)
def test_fa2_generation(model, kind, cache, name):
    """Greedy decoding through the KV cache gives eager's tokens."""
    tokens, arguments = batch(kind)
    ways = ("eager", name)
    made = [generate(build(model, way, exact(model)), tokens, arguments, cache) for way in ways]
    assert torch.equal(*made)


@pytest.mark.parametrize("model", ["llama-gqa", "gpt_oss-sinks"])
def test_fa2_collated_rows(model, name):
    """What DataCollatorWithFlattening hands over: lengths, their maxima, positions."""
    rows = [{"input_ids": torch.randint(1, 60, (n,)).tolist()} for n in (5, 1, 11)]
    collate = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_position_ids=True, return_seq_idx=False
    )
    packed = {k: v for k, v in collate(rows).items() if k != "labels"}
    assert {"cu_seq_lens_q", "max_length_k", "position_ids"} <= set(packed)
    found = build(model, name).eval()(**packed, use_cache=False).logits[0]
    net = build(model, "eager").eval()
    alone = [net(torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=2e-5)


def test_fa2_dropout_in_training_only(name):
    """GPT-2's attn_pdrop acts in training, repeats under a seed, and is off in evaluation."""
    tokens, arguments = batch("right")
    net = build("gpt2", name, torch.bfloat16, attn_pdrop=0.3).train()
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(net(tokens, **arguments).logits)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    net.eval()
    assert torch.equal(net(tokens, **arguments).logits, net(tokens, **arguments).logits)


def test_fa2_autocast_and_checkpointing(name):
    """An fp32 model under autocast, with dropout and gradient checkpointing."""
    tokens, arguments = batch("left")
    net = build("gpt2", name, attn_pdrop=0.2).train()
    net.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16):
        net(tokens, labels=tokens, **arguments).loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


paged = pytest.mark.skipif(
    "k_cache" not in inspect.signature(fa_utils._flash_attention_forward).parameters,
    reason="this transformers has its paged step elsewhere; see the continuous batching on a GPU",
)


@paged
@pytest.mark.parametrize("model", ["mistral-window", "gpt_oss-sinks", "gemma2-softcap"])
def test_fa2_continuous_batching(model, name):
    net = build(model, name).eval()
    with honest_about_the_device():
        check_continuous_batching(net, model)


@paged
def test_fa2_paged_decoding(name):
    """The step of continuous batching: new keys into a paged cache, then attention over it."""
    caches = [torch.randn(8, 4, 2, 16) for _ in "kv"]
    table = torch.tensor([[5, 1, -1], [0, 7, 2]], dtype=torch.int32)
    lengths = torch.tensor([6, 9])  # the new key included
    q, k, v = (torch.randn(1, 2, heads, 16) for heads in (4, 2, 2))
    out = fa_utils._flash_attention_forward(
        q,
        k,
        v,
        None,
        query_length=1,
        is_causal=True,
        attn_implementation=name,
        cu_seq_lens_k=torch.tensor([0, 6, 15], dtype=torch.int32),
        max_length_q=1,
        max_length_k=9,
        block_table=table,
        k_cache=caches[0],
        v_cache=caches[1],
    )
    for row, length in enumerate(lengths.tolist()):
        pages = table[row][table[row] >= 0].long()
        keys, values = (cache[pages].flatten(0, 1)[None, :length] for cache in caches)
        assert torch.equal(keys[0, -1], k[0, row]) and torch.equal(values[0, -1], v[0, row])
        expected = flash_attn.flash_attn_func(q[:, row : row + 1], keys, values, causal=True)
        torch.testing.assert_close(out[:, row : row + 1], expected)


def test_fa2_compiles(name):
    torch.compiler.reset()
    tokens, _ = batch("none")
    net = build("llama-gqa", name, torch.bfloat16).eval()  # of fp32 transformers would log
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(tokens, use_cache=False).logits
        torch.testing.assert_close(found, net(tokens, use_cache=False).logits)
