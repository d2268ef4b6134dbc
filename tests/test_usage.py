# SPDX-License-Identifier: BSD-3-Clause
"""What is done with calls, masks and modules beyond calling them: other kinds of tensors and of
numbers, copies and casts, the meta device, inference mode, autocast in autocast, threads."""

import copy
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from flash_attn import BlockMask, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.modules.mha import MHA, FlashSelfAttention
from flash_attn.nn import MultiheadAttention


def leaves(*shape):
    return [torch.randn(*shape or (2, 5, 4, 8), requires_grad=True) for _ in "qkv"]


# ---- tensors


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (3, 5)]), "nested"),
        (lambda: torch.randn(2, 5, 4, 8).to_sparse(), "torch.sparse_coo"),
    ],
    ids=["nested", "sparse"],
)
def test_usage_tensors_that_are_not_dense(make, text):
    x = make()
    with pytest.raises(TypeError, match=f"must be dense tensors, got {text}"):
        flash_attn_func(x, x, x)


def test_usage_lazily_negated_and_overlapping_views():
    q, k, v = leaves()
    torch.testing.assert_close(flash_attn_func(torch._neg_view(q), k, v), flash_attn_func(-q, k, v))
    x = torch.randn(100).as_strided((2, 5, 2, 8), (7, 3, 1, 1))
    assert torch.equal(flash_attn_func(x, x, x), flash_attn_func(*(x.clone() for _ in "qkv")))


def test_usage_meta_tensors():
    """Shapes without values, forward and backward, by every public form."""
    q = torch.empty(2, 5, 4, 8, device="meta", requires_grad=True)
    flash_attn_func(q, q, q, causal=True, dropout_p=0.1).sum().backward()
    assert q.grad.shape == q.shape
    flat, ends = torch.empty(9, 4, 8, device="meta"), torch.empty(3, dtype=torch.int32).to("meta")
    assert flash_attn_varlen_func(flat, flat, flat, ends, ends).shape == flat.shape
    cache, one = torch.empty(2, 16, 4, 8, device="meta"), torch.empty(2, 1, 4, 8, device="meta")
    out = flash_attn_with_kvcache(one, cache, cache, one, one, cache_seqlens=3)
    assert out.shape == one.shape


def test_usage_default_device_and_dtype_do_not_matter():
    q, k, v = leaves()
    expected = flash_attn_func(q, k, v, causal=True)
    module = MHA(32, 4, rotary_emb_dim=8, use_alibi=True)
    x = torch.randn(2, 5, 32)
    output = module(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(flash_attn_func(q, k, v, causal=True), expected)
            assert flash_attn_func(q, k, v, dropout_p=0.5).device.type == "cpu"
            torch.testing.assert_close(copy.deepcopy(module)(x), output)
    finally:
        torch.set_default_dtype(torch.float32)


def test_usage_saved_inputs_changed_in_place():
    """autograd notices, as for its own operators."""
    q, k, v = leaves()
    for number in range(2):
        inputs = q * 1, k, v
        out = flash_attn_func(*inputs)
        with torch.no_grad():
            (inputs[0], out)[number].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_usage_gradients_of_many_at_once():
    """is_grads_batched maps the backward pass; without it, one by one."""
    inputs = leaves()
    out = flash_attn_func(*inputs, causal=True)
    many = torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, inputs, many, is_grads_batched=True, retain_graph=True)
    for number, dout in enumerate(many):
        alone = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for one, other in zip(batched, alone, strict=True):
            torch.testing.assert_close(one[number], other)


# ---- numbers


def test_usage_numbers_of_numpy():
    q, k, v = leaves()
    plain = {"softmax_scale": 0.25, "softcap": 3.0, "causal": True, "window_size": (2, 1)}
    numpy = {
        "softmax_scale": np.float32(0.25),
        "softcap": np.float16(3),
        "causal": np.bool_(True),
        "window_size": (np.int64(2), np.int32(1)),
        "deterministic": np.bool_(False),
        "dropout_p": np.float32(0),
    }
    assert torch.equal(flash_attn_func(q, k, v, **numpy), flash_attn_func(q, k, v, **plain))
    mask = BlockMask.sliding_window(np.int64(5), 5, np.int32(2), block_size=np.int64(2))
    assert mask.block_size == (2, 2) and type(mask.block_size[0]) is int
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 16, 4, 8)
    expected = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)
    found = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=np.int64(3), num_splits=np.int8(2)
    )
    assert torch.equal(found, expected)


def test_usage_deterministic_of_another_kind():
    q, k, v = leaves()
    with pytest.raises(TypeError, match="deterministic must be a bool, got str"):
        flash_attn_func(q, k, v, deterministic="yes")
    flash_attn_func(q, k, v, deterministic=None)  # what transformers' callers may hand on


# ---- autocast


def test_usage_autocast_in_autocast():
    """The innermost one counts; fp64 stays; bias and sinks may have the dtype that q had."""
    inputs = leaves()
    half = [x.detach().bfloat16() for x in inputs]
    extras = {"attn_bias": half[0][0, :, 0, :5], "learnable_sink": half[0][0, 0, :, 0]}
    with torch.autocast("cpu", torch.float16):
        assert flash_attn_func(*inputs).dtype == torch.float16
        found = flash_attn_func(*half, **extras)
        with torch.autocast("cpu", torch.bfloat16):
            assert flash_attn_func(*inputs).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert flash_attn_func(*inputs).dtype == torch.float32
        assert flash_attn_func(*(x.double() for x in inputs)).dtype == torch.float64
    expected = flash_attn_func(
        *(x.half() for x in half), **{name: x.half() for name, x in extras.items()}
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match="attn_bias must be"):
        flash_attn_func(*inputs, **extras)


# ---- copies, casts, the meta device


def duplicates(x):
    """x through deepcopy, pickle and torch.save."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(file, weights_only=False)


KINDS = {
    "rotary": {"rotary_emb_dim": 8},
    "xpos": {"rotary_emb_dim": 8, "rotary_emb_scale_base": 16},
    "alibi": {"use_alibi": True},
    "dwconv": {"dwconv": True},
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_usage_copies_of_modules(name, inference):
    """Also of one that ran in inference mode: the copies train."""
    module, x = MHA(32, 4, causal=True, **KINDS[name]), torch.randn(2, 5, 32)
    with torch.inference_mode(inference):
        expected = module(x)
    for other in duplicates(module):
        out = other(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("block_size", [16, 24], ids=["whole", "bits"])
def test_usage_copies_of_block_masks(block_size, inference):
    """Masks made in inference mode serve training too."""
    with torch.inference_mode(inference):
        mask = BlockMask.sliding_window(64, 64, 8, block_size=block_size)
    inputs = leaves(1, 64, 2, 8)
    out = flash_attn_func(*inputs, block_mask=mask)
    out.sum().backward()
    for other in (*duplicates(mask), copy.copy(mask), mask.to("cpu")):
        assert torch.equal(flash_attn_func(*inputs, block_mask=other), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_usage_casts_keep_alibi_in_fp32(dtype):
    module, x = MHA(48, 12, use_alibi=True, causal=True), torch.randn(2, 5, 48)
    expected = module(x)
    found = module.to(dtype)(x.to(dtype))
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.01)
    own = FlashSelfAttention(alibi_slopes=torch.rand(4)).to(dtype)
    own(torch.randn(1, 5, 3, 4, 8, dtype=dtype))
    assert own.alibi_slopes.dtype == module.inner_cross_attn.alibi_slopes.dtype == torch.float32


@pytest.mark.parametrize("name", ["rotary", "xpos", "alibi"])
def test_usage_modules_made_on_the_meta_device(name):
    """What no checkpoint holds has its values all the same."""
    expected, x = MHA(32, 4, causal=True, **KINDS[name]), torch.randn(2, 5, 32)
    with torch.device("meta"):
        module = MHA(32, 4, causal=True, **KINDS[name])
    if name != "alibi":
        assigned = copy.deepcopy(module)
        assigned.load_state_dict(expected.state_dict(), assign=True)
        torch.testing.assert_close(assigned(x), expected(x))
    module.to_empty(device="cpu").load_state_dict(expected.state_dict())
    torch.testing.assert_close(module(x), expected(x))


# ---- transforms of whole modules, threads


@pytest.mark.parametrize("kind", ["mha", "nn"])
def test_usage_ensemble_of_modules(kind):
    """torch.func: models stacked and mapped, and the gradients of each."""

    def make():
        if kind == "mha":
            return MHA(32, 4, num_heads_kv=2, rotary_emb_dim=8, causal=True)
        return MultiheadAttention(32, 4, batch_first=True)

    def run(model, x):
        return model(x) if kind == "mha" else model(x, x, x, need_weights=False)[0]

    models, x = [make() for _ in range(3)], torch.randn(2, 5, 32)
    parameters, buffers = torch.func.stack_module_state(models)

    def loss(parameters, buffers):
        given = (x,) if kind == "mha" else (x, x, x)
        options = {} if kind == "mha" else {"need_weights": False}
        call = torch.func.functional_call(models[0], (parameters, buffers), given, options)
        return (call if kind == "mha" else call[0]).square().sum()

    found = torch.vmap(torch.func.grad(loss))(parameters, buffers)
    for number, model in enumerate(models):
        run(model, x).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                found[name][number], parameter.grad, rtol=1e-4, atol=1e-5, msg=name
            )


@pytest.mark.parametrize("called", [False, True])
def test_usage_rotary_tables_are_no_tracers(called):
    """Export and fake tensors leave nothing behind in the module, and its tables bound nothing."""
    module, x, longer = MHA(32, 4, rotary_emb_dim=8), torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    if called:
        module(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        module(fake.from_tensor(x))
    dynamic = ({1: torch.export.Dim("length", min=2, max=64)},)
    program = torch.export.export(module, (x,), dynamic_shapes=dynamic, strict=False)
    torch.testing.assert_close(program.module()(longer), module(longer))
    torch.testing.assert_close(module(x), copy.deepcopy(module)(x))


def test_usage_threads():
    """Calls at once, and one module whose tables grow meanwhile."""
    inputs = leaves(2, 100, 4, 16)
    out = flash_attn_func(*inputs, causal=True)
    grads = torch.autograd.grad(out.sum(), inputs)
    module = MHA(32, 4, rotary_emb_dim=8, causal=True)
    rows = [torch.randn(1, n, 32) for n in (3, 50, 7, 90)]
    expected = [copy.deepcopy(module)(x) for x in rows]
    errors = []

    def work(number):
        try:
            for _ in range(5):
                own = [x.detach().requires_grad_() for x in inputs]
                result = flash_attn_func(*own, causal=True)
                assert torch.equal(result, out)
                for a, b in zip(torch.autograd.grad(result.sum(), own), grads, strict=True):
                    torch.testing.assert_close(a, b)
                torch.testing.assert_close(module(rows[number]), expected[number])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
