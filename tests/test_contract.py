# SPDX-License-Identifier: BSD-3-Clause
"""Corners of the contract that are easily lost: what is refused, with which error, and that a cache
is untouched when it is. Every row runs on the kernels and on the reference, which must say the
same."""

import re

import numpy as np
import pytest
import torch

import flash_attn
from flash_attn import BlockMask, _autograd, _checks, flash_attn_interface
from flash_attn import flash_attn_func as dense
from flash_attn import flash_attn_varlen_func as packed
from flash_attn import flash_attn_with_kvcache as cached

BIG = 2**32
HALF = (torch.float16, torch.bfloat16, torch.float32)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def longs(*values):
    return ints(*values, dtype=torch.int64)


def cache(**changes):
    args = {name: torch.randn(2, 1, 2, 8) for name in "qkv"}
    args |= {name: torch.randn(2, 8, 2, 8) for name in ("k_cache", "v_cache")}
    return args | {"cache_seqlens": ints(3, 5)} | changes


def pages(**changes):
    args = {name: torch.randn(4, 4, 2, 8) for name in ("k_cache", "v_cache")}
    return cache(**args | {"block_table": ints(0, 1, 2, 3).view(2, 2)} | changes)


def tables(rows=8, width=2):
    return {name: torch.randn(rows, width) for name in ("rotary_cos", "rotary_sin")}


def ragged(**changes):
    args = {"q": torch.randn(7, 2, 8), "k": torch.randn(12, 2, 8), "v": torch.randn(12, 2, 8)}
    return args | {"cu_seqlens_q": ints(0, 3, 7), "cu_seqlens_k": ints(0, 8, 12)} | changes


def ragged_pages(**changes):
    args = {"k": torch.randn(4, 4, 2, 8), "v": torch.randn(4, 4, 2, 8)}
    return ragged(**args | {"block_table": ints(0, 1, 2, 3).view(2, 2)} | changes)


def blocks(rows, columns, size):
    return BlockMask.from_dense(torch.ones(rows, columns, dtype=torch.bool), size)


def broken_blocks():
    mask = blocks(1, 2, (1, 4))
    mask.indices[0, 0, 0, 1] = 7
    return mask


# ---- contents: the kernels and the reference refuse with the same words, and write nothing


WRONG_CACHES = [
    ("cache_leftpad[1] must not be negative, got -1", cache(cache_leftpad=ints(0, -1))),
    ("cache_seqlens[0] + seqlen_new must lie in 0 to 8", cache(cache_seqlens=longs(BIG, 5))),
    ("got 2147483647 or more + 1", cache(cache_seqlens=longs(BIG + 3, 5))),
    ("cache_seqlens[1] + seqlen_new", cache(cache_seqlens=longs(3, -BIG))),
    ("cache_seqlens[1] + seqlen_new", pages(cache_seqlens=ints(3, 8))),
    ("cache_batch_idx[1] must lie in 0 to 1", cache(cache_batch_idx=longs(0, BIG + 1))),
    ("cache_batch_idx[0] must lie in 0 to 1, got -1", cache(cache_batch_idx=ints(-1, 0))),
    ("cache_batch_idx must name each cache entry once", cache(cache_batch_idx=ints(1, 1))),
    ("cache_leftpad[0] must not be negative", cache(cache_leftpad=longs(-BIG, 0))),
    ("block_table[1, 0] must lie in 0 to 3", pages(block_table=longs(0, 1, BIG, 3).view(2, 2))),
    ("block_table[1, 1] must lie in 0 to 3", pages(block_table=ints(0, 1, 2, 4).view(2, 2))),
    ("block_table[0, 0] must lie in 0 to 3", pages(block_table=ints(-2, 1, 2, 3).view(2, 2))),
    ("block_table[0, 0] must lie in 0 to 3", pages(block_table=ints(-2, -1, 2, 3).view(2, 2))),
    ("attn_bias must reach the longest", pages(attn_bias=torch.randn(2, 1, 1, 3))),
    ("attn_bias must reach the longest", pages(attn_bias=torch.randn(1, 1, 1, 0))),
    ("block_mask has 1 rows and 1 columns", pages(block_mask=blocks(1, 1, (1, 4)))),
    ("block_mask's indices must ascend", cache(block_mask=broken_blocks())),
    ("rotary_cos and rotary_sin hold positions 0 to 4", cache(**tables(5))),
    ("rotary_dim from 2 to head_dim", cache(**tables(8, 0))),
    ("one dtype", cache(**tables(8) | {"rotary_sin": torch.randn(8, 2, dtype=torch.bfloat16)})),
]


@pytest.mark.parametrize("text,args", WRONG_CACHES, ids=[text[:50] for text, _ in WRONG_CACHES])
def test_contract_cache_is_untouched(text, args):
    found = []
    for backend in (None, "reference"):
        caches = [args["k_cache"].clone(), args["v_cache"].clone()]
        if "one dtype" in text:
            error = TypeError
            args = args | {name: args[name].bfloat16() for name in ("q", "k", "v")}
            caches = [x.bfloat16() for x in caches]
        else:
            error = ValueError
        before = [x.clone() for x in caches]
        with pytest.raises(error) as caught:
            cached(**args | {"k_cache": caches[0], "v_cache": caches[1]}, backend=backend)
        assert text in str(caught.value)
        assert all(map(torch.equal, caches, before))
        found.append(str(caught.value))
    assert found[0] == found[1]


WRONG_LENGTHS = [
    ("cu_seqlens_q must start at 0", ragged(cu_seqlens_q=longs(0, 3, BIG + 7))),
    ("[0, 8, 2147483647 or more]", ragged(cu_seqlens_k=longs(0, 8, BIG + 12))),
    ("cu_seqlens_k must start at 0", ragged(cu_seqlens_k=longs(BIG, 8, 12))),
    ("seqused_k[0]", ragged(seqused_k=longs(BIG, 1))),
    ("seqused_k[1]", ragged(seqused_k=ints(8, 5))),
    ("cu_seqlens_k must start at 0", ragged_pages(cu_seqlens_k=ints(5, 8, 12))),
    (
        "cu_seqlens_k must start at 0",
        ragged_pages(cu_seqlens_k=ints(0, 8, 4), seqused_k=ints(1, 1)),
    ),
    ("cu_seqlens_k gives sequence 1 9 keys", ragged_pages(cu_seqlens_k=ints(0, 8, 17))),
    ("seqused_k[1]", ragged_pages(seqused_k=ints(8, 5))),
    ("block_table[1, 0]", ragged_pages(block_table=ints(0, 1, 4, 3).view(2, 2))),
    ("block_table[0, 1]", ragged_pages(block_table=longs(0, BIG, 2, 3).view(2, 2))),
    *(
        ("attn_bias must reach the longest", ragged(attn_bias=torch.randn(1, 1, *shape)))
        for shape in ((0, 0), (4, 0), (1, 0), (0, 1), (3, 1), (1, 7))
    ),
    ("attn_bias must reach the longest", ragged_pages(attn_bias=torch.randn(1, 1, 1, 0))),
]


@pytest.mark.parametrize("text,args", WRONG_LENGTHS, ids=[text[:50] for text, _ in WRONG_LENGTHS])
def test_contract_contents_of_lengths(text, args):
    found = []
    for backend in (None, "reference"):
        with pytest.raises(ValueError) as caught:
            packed(**args, backend=backend)
        assert text in str(caught.value)
        found.append(str(caught.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["cu_seqlens_k", "seqused_k", "block_table"])
def test_contract_checked_mode(name, monkeypatch, device):
    """FLASH_ATTN_CHECK=1 raises on every device what the CPU raises always."""
    monkeypatch.setenv("FLASH_ATTN_CHECK", "1")
    wrong = {
        "cu_seqlens_k": longs(0, BIG, 12),
        "seqused_k": longs(BIG, 1),
        "block_table": longs(0, BIG, 2, 3).view(2, 2),
    }
    args = (ragged_pages if name == "block_table" else ragged)(**{name: wrong[name]})
    with pytest.raises(ValueError, match=name):
        packed(**{key: x.to(device) for key, x in args.items()})


def test_contract_bias_without_elements_where_nothing_is():
    """A length of 0 has a bias of size 0: valid, and the answer is that of no keys."""
    args = ragged(cu_seqlens_k=ints(0, 0, 0), attn_bias=torch.randn(1, 1, 4, 0))
    for backend in (None, "reference"):
        out, lse = packed(**args, return_lse=True, backend=backend)
        assert not out.any() and (lse == float("-inf")).all()


def test_contract_paged_lengths_of_cu_seqlens(device):
    """cu_seqlens_k alone gives the lengths of pages; seqused_k shortens them."""
    args = {name: x.to(device) for name, x in ragged_pages(cu_seqlens_k=ints(0, 7, 9)).items()}
    live = ints(7, 2).to(device)
    flat = {name: args[name].reshape(16, 2, 8) for name in "kv"}
    rows = [*range(7), 8, 9]
    flat = {name: x[rows] for name, x in flat.items()} | {"block_table": None}
    torch.testing.assert_close(packed(**args, causal=True), packed(**args | flat, causal=True))
    wide = args | {"cu_seqlens_k": ints(0, 8, 16).to(device)}
    shortened = packed(**wide, seqused_k=live, causal=True)
    assert torch.equal(shortened, packed(**args, causal=True))


def test_contract_padding_sequence_has_any_length(device):
    """A row of -1 in the block table: neither its length nor its position is looked at."""
    args = pages(**tables(), causal=True, attn_bias=torch.randn(2, 1, 1, 4))
    args["block_table"] = ints(0, 1, -1, -1).view(2, 2)
    results = []
    for length in (0, 900, -5):
        call = args | {"cache_seqlens": ints(3, length)}
        call = {key: x.to(device) if hasattr(x, "to") else x for key, x in call.items()}
        for backend in (None, "reference"):
            call |= {name: args[name].clone().to(device) for name in ("k_cache", "v_cache")}
            results.append(cached(**call, backend=backend))
            assert torch.equal(call["k_cache"][2:].cpu(), args["k_cache"][2:])
    for found in results:
        torch.testing.assert_close(found, results[0])
        assert not found[1].any()


@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_contract_wrong_backend_writes_nothing(backend):
    args = cache()
    before = args["k_cache"].clone()
    with pytest.raises(NotImplementedError, match=backend):
        cached(**args, backend=backend)
    assert torch.equal(args["k_cache"], before)


def test_contract_append_into_expanded_cache():
    args = cache(k_cache=torch.randn(1, 8, 2, 8).expand(2, 8, 2, 8))
    with pytest.raises(ValueError, match="k_cache must not be expanded"):
        cached(**args)
    cached(**args | {"k": None, "v": None})


def test_contract_bias_longer_than_the_capacity(device):
    """With and without cache_seqlens; what lies past the capacity is of no key."""
    args = {name: x.to(device) for name, x in cache(cache_seqlens=ints(8, 8)).items()}
    args |= {"k": None, "v": None}
    bias = torch.randn(1, 2, 1, 11, device=device)
    expected = cached(**args, attn_bias=bias[..., :8])
    for backend in (None, "reference"):
        for lengths in (args["cache_seqlens"], None):
            call = args | {"cache_seqlens": lengths, "attn_bias": bias}
            torch.testing.assert_close(cached(**call, backend=backend), expected)


def test_contract_page_size_of_zero_names_the_argument():
    with pytest.raises(ValueError, match="k_cache must have pages"):
        cached(**pages(k_cache=torch.randn(4, 0, 2, 8), v_cache=torch.randn(4, 0, 2, 8)))


# ---- gradients that do not exist


@pytest.mark.parametrize("name", ["q", "k", "alibi_slopes", "attn_bias", "s_aux", "learnable_sink"])
def test_contract_block_table_has_no_backward(name):
    args = ragged_pages()
    extra = {"alibi_slopes": torch.randn(2), "attn_bias": torch.randn(1, 2, 4, 8)}
    extra |= {"s_aux": torch.randn(2), "learnable_sink": torch.randn(2)}
    args[name] = (args | extra)[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="block_table has no backward"):
        packed(**args)
    with torch.no_grad():
        packed(**args)


def test_contract_operator_of_a_cache_has_no_backward():
    """Below the public functions too: the error comes with the call, not with the backward."""
    q = torch.randn(2, 3, 2, 8, requires_grad=True)
    options = (1.0, 0.0, 0.0, -1, -1, 0, 0, False, 0)
    call = (q, q, q, None, None, None, ints(0, 1), *(None,) * 13, *options)
    with pytest.raises(NotImplementedError, match="leftpad_k"):
        _autograd.attend(call)


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin"])
def test_contract_rotary_has_no_backward(name):
    args = cache(**tables())
    args[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward"):
        cached(**args)
    with torch.no_grad():
        cached(**args)


# ---- numbers and kinds


@pytest.mark.parametrize("name,value", [("softmax_scale", 1e39), ("softmax_scale", -1e39)])
@pytest.mark.parametrize("dtype", HALF)
def test_contract_scale_range(name, value, dtype):
    check_range(name, value, dtype)


@pytest.mark.parametrize("value", [1e39, 1e-300])
@pytest.mark.parametrize("dtype", HALF)
def test_contract_softcap_range(value, dtype):
    check_range("softcap", value, dtype)


def check_range(name, value, dtype):
    q = torch.randn(1, 3, 1, 8, dtype=dtype)
    for call in (lambda **x: dense(q, q, q, **x), lambda **x: cached(q, q, q, **x)):
        with pytest.raises(ValueError, match=rf"{name} must be .*magnitude 2\*\*-126 to 2\*\*127"):
            call(**{name: value})


@pytest.mark.parametrize("value", [0.0, 2.0**-126, 2.0**126, 2.0**127])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_contract_range_is_usable(name, value):
    """At the ends of what is allowed nothing is NaN for rows of length 1; fp64 reaches further."""
    q = torch.nn.functional.normalize(torch.randn(1, 3, 1, 8), dim=-1) * 0.99
    assert not dense(q, q, q, **{name: value}).isnan().any()
    wide = value**7 if value < 1 else min(value**7, 2.0**1000)
    assert not dense(*(q.double(),) * 3, **{name: wide}).isnan().any()


@pytest.mark.parametrize("name", ["softcap", "dropout_p", "softmax_scale"])
@pytest.mark.parametrize("value", [torch.tensor([0.1, 0.2]), "0.1", None, [0.1]])
def test_contract_numbers_of_another_kind(name, value):
    if name == "softmax_scale" and value is None:
        return  # the default
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(TypeError, match=f"flash_attn: {name} must be"):
        dense(q, q, q, **{name: value})


@pytest.mark.parametrize("value", ["no", None, 1.0, torch.tensor(True), torch.tensor([1, 0])])
def test_contract_causal_of_another_kind(value):
    q = torch.randn(1, 3, 1, 8)
    for call in (dense, cached):
        with pytest.raises(TypeError, match="causal must be a bool"):
            call(q, q, q, causal=value)
    with pytest.raises(ValueError, match="causal"):
        dense(q, q, q, causal=2)


def test_contract_causal_kinds():
    q = torch.randn(1, 3, 1, 8)
    for value in (True, False, 1, 0, np.True_, np.False_):
        assert torch.equal(dense(q, q, q, causal=value), dense(q, q, q, causal=bool(value)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_contract_autocast_leaves_integers(dtype):
    q, k = torch.ones(1, 3, 1, 8).to(dtype), torch.randn(1, 3, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for call in (dense, cached):
            with pytest.raises(TypeError, match="q, .*dtype"):
                call(q, k, k)
            with pytest.raises(TypeError, match="must be float16"):
                call(q, q, q)
        assert dense(k, k, k).dtype == torch.bfloat16
        assert cached(k, k.bfloat16(), k.bfloat16()).dtype == torch.bfloat16


def test_contract_wide_window_moves_the_queries(device):
    """A window wider than any sequence is a window still: rotary turns each query by its own
    position."""
    call = {key: x.to(device) for key, x in cache(**tables(16)).items()}
    call |= {name: torch.randn(2, 3, 2, 8, device=device) for name in "qkv"}
    call["cache_seqlens"] = call["cache_seqlens"].clamp(max=4)
    expected = cached(**call, window_size=(100, 100))
    for wide in (2**30, 2**30 + 1, 2**40):
        assert torch.equal(cached(**call, window_size=(wide, wide)), expected)
    assert not torch.allclose(cached(**call), expected)


# ---- block masks


@pytest.mark.parametrize(
    "size,error,text",
    [
        (True, TypeError, "block_size"),
        (2.5, TypeError, "block_size"),
        (None, TypeError, "block_size"),
        ((4, True), TypeError, "block_size"),
        ((4, "a"), TypeError, "block_size"),
        ((4,), ValueError, "block_size"),
        ((4, 4, 4), ValueError, "block_size"),
        (0, ValueError, "1 to 2"),
        (2**40, ValueError, "1 to 2"),
        ((4, 2**40), ValueError, "1 to 2"),
    ],
)
def test_contract_block_size(size, error, text):
    for make in (
        lambda: blocks(1, 1, size),
        lambda: BlockMask.from_indices(ints(1), ints(0).view(1, 1), size),
    ):
        with pytest.raises(error, match=f"^flash_attn: .*{text}"):
            make()


@pytest.mark.parametrize("columns,error", [(-1, ValueError), ("a", TypeError), (True, TypeError)])
def test_contract_block_columns(columns, error):
    with pytest.raises(error, match="^flash_attn: columns"):
        BlockMask.from_indices(ints(0), ints(0).view(1, 1), 4, columns=columns)


# ---- transforms, explain, check, wording


def test_contract_vmap_over_nothing():
    q = torch.randn(0, 2, 6, 2, 8, requires_grad=True)
    one = torch.randn(2, 6, 2, 8, requires_grad=True)
    assert torch.vmap(dense)(q, q, q).shape == (0, 2, 6, 2, 8)
    bias = torch.randn(0, 2, 6, 6)
    loop = torch.vmap(lambda q, b: dense(q, one, one, attn_bias=b, return_lse=True))(q, bias)
    assert loop[0].shape == (0, 2, 6, 2, 8) and loop[1].shape == (0, 2, 2, 6)
    mixed = torch.vmap(dense, (0, None, None))(q, one, one)
    grads = torch.autograd.grad(mixed.sum(), (q, one))
    assert grads[0].shape == q.shape and not grads[1].any()

    def loss(q):
        return dense(q, one, one).sum()

    assert torch.vmap(torch.func.grad(loss))(q).shape == q.shape


def test_contract_check_under_modes():
    """check() differentiates for itself and judges in the inputs' dtype."""
    q = torch.randn(1, 9, 2, 8)
    expected = flash_attn.check(q, q, q).rows
    for mode in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        with mode:
            assert flash_attn.check(q, q, q).rows == expected
    with pytest.raises(TypeError, match="q must be"):
        flash_attn.check(1, q, q)


@pytest.mark.parametrize("backend", [None, "sm90"])
def test_contract_explain_says_each_reason_once(backend):
    q = torch.randn(1, 3, 1, 8)
    explained = flash_attn.explain(q, q, q, backend=backend)
    kernels = re.findall(r"\b\w+_(?:forward|backward)_\w+", str(explained))
    assert kernels and len(kernels) == len(set(kernels))
    assert not any("\n" in plan for plan in explained.plans.values())


def test_contract_block_size_n_is_longer_than_any_row():
    """FlashAttention 2's tests split S_dmask by it: one block."""
    size = flash_attn_interface._get_block_size_n(torch.device("cpu"), 64, True, False)
    assert size >= _checks.LONGEST
    assert len(torch.randn(1, 1, 2, 5).split(size, -1)) == 1


def test_contract_wording_of_dtypes():
    """Alternatives are named once, and read as a list."""
    args = cache(**tables())
    with pytest.raises(TypeError, match="rotary_cos must be float32, got"):
        cached(**args | {"rotary_cos": args["rotary_cos"].double()})
    q = torch.randn(1, 3, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="attn_bias must be bool, bfloat16 or float32, got"):
        dense(q, q, q, attn_bias=torch.randn(3, 3, dtype=torch.float64))


def test_contract_compile_symbolic_arguments():
    """causal from a symbolic size, a symbolic window: one graph."""
    torch.compiler.reset()

    def run(q, left):
        return dense(q, q, q, causal=q.shape[1] > 4, window_size=(left, -1))

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, left in ((6, 2), (9, 3)):
        q = torch.randn(1, length, 2, 8)
        torch.testing.assert_close(compiled(q, left), run(q, left))
