# SPDX-License-Identifier: BSD-3-Clause
"""Public bug reports as tests, continued: launch limits, determinism, dropout, transforms,
caches, block lists, packaging, messages."""

import importlib.metadata
import inspect
import os
import subprocess
import sys
from unittest import mock

import cases
import pytest
import torch
from problem import Problem, assert_copies, check

import flash_attn
from flash_attn import BlockMask, flash_attn_func, flash_attn_varlen_func

NEG_INF = float("-inf")


@pytest.mark.parametrize("kind", ["transposed", "every_second", "slice"])
def test_bc27_non_contiguous_dout(kind, device):
    q = torch.randn(2, 32, 4, 128, device=device, requires_grad=True)
    k, v = (torch.randn(2, 32, 1, 128, device=device, requires_grad=True) for _ in "kv")
    dout = {
        "transposed": torch.randn(2, 4, 32, 128, device=device).transpose(1, 2),
        "every_second": torch.randn(2, 32, 4, 256, device=device)[..., ::2],
        "slice": torch.randn(2, 32, 4, 384, device=device)[..., 128:256],
    }[kind]
    outs = [flash_attn_func(q, k, v, deterministic=True) for _ in range(2)]
    found = torch.autograd.grad(outs[0], (q, k, v), dout)
    expected = torch.autograd.grad(outs[1], (q, k, v), dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seqlen_k", [43, 361, 4095])
def test_bc32_bias_rows_no_multiple_of_16_bytes(seqlen_k, device):
    case = cases.Case(1, 9, seqlen_k, 2, 2, 32, dtype="fp16", bias="head", contiguous=True)
    check(case, device)


def test_bc33_odd_storage_offset(device):
    flat = torch.randn(1 + 2 * 33 * 2 * 46, device=device).half()
    q = flat[1:].view(2, 33, 2, 46).detach().requires_grad_()
    assert q.data_ptr() % 4 == 2
    copy = q.detach().clone().requires_grad_()
    out, expected = (flash_attn_func(x, x, x, causal=True, deterministic=True) for x in (q, copy))
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    (a,), (b,) = torch.autograd.grad(out, q, dout), torch.autograd.grad(expected, copy, dout)
    assert torch.equal(a, b)


def test_bc36_many_batches_of_one_query(device):
    """Scratch is not sized by a rounded length: 8,300 batches x 16 heads, one query each."""
    q, k, v = (torch.randn(8300, 1, 16, 8, device=device, requires_grad=True) for _ in range(3))
    out = flash_attn_func(q, k, v)
    assert_copies(out, v)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, v, dout)[0], dout)


def test_bc39_more_sequences_than_a_grid(device):
    cu = torch.arange(65_537, dtype=torch.int32, device=device)
    q = torch.randn(65_536, 1, 64, device=device).half().requires_grad_()
    out = flash_attn_varlen_func(q, q, q, cu, cu, 1, 1)
    assert torch.equal(out, q)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_bc40_more_heads_than_a_grid(device):
    q = torch.randn(1, 3, 71_280, 8, device=device)
    out = flash_attn_func(q, q, q)
    picked = [0, 65_535, 65_536, 71_279]
    torch.testing.assert_close(
        out[:, :, picked], flash_attn_func(*(q[:, :, picked],) * 3, backend="reference")
    )


@pytest.mark.parametrize("batch", [65_535, 65_536])
def test_bc41_large_batches_are_written(batch, device):
    q = torch.ones(batch, 1, 1, 4, device=device)
    assert (flash_attn_func(q, q, q) == 1).all()


def test_bc50_tiles_from_the_device_limit():
    """A GPU with 99 KB of shared memory a block: a row that fits, or a message with head_dim and
    limit."""
    plan = flash_attn.explain(
        *(torch.empty(1, 256, 2, 256, dtype=torch.bfloat16),) * 3, causal=True
    )
    assert "head_dim" in str(plan) or "256" in str(plan)


@pytest.mark.parametrize("packed", [False, True])
def test_bc52_deterministic_is(packed, two_threads, device):
    case = cases.Case(
        dtype="bf16",
        seqlen_q=130,
        seqlen_k=150,
        packed=packed,
        bias="one",
        sinks=True,
        slopes="heads",
    )
    problem = Problem(case, device)
    runs = []
    for _ in range(30):
        out, lse = problem.call(return_lse=True, deterministic=True)
        runs.append(problem.gradients(out, lse, problem.leaves))
    assert all(torch.equal(run[name], x) for run in runs for name, x in runs[0].items())


def test_bc53_deterministic_reaches_the_operator():
    """In every public form with a gradient, and from torch's global switch."""
    from flash_attn import _autograd, _ops

    q = torch.randn(6, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    dense, packed, kv, qkv = (
        q[None],
        (cu, cu, 6, 6),
        torch.stack([q, q], 1),
        torch.stack([q] * 3, 1),
    )
    forms = [
        lambda **m: flash_attn_func(dense, dense, dense, **m),
        lambda **m: flash_attn.flash_attn_kvpacked_func(dense, kv[None], **m),
        lambda **m: flash_attn.flash_attn_qkvpacked_func(qkv[None], **m),
        lambda **m: flash_attn_varlen_func(q, q, q, *packed, **m),
        lambda **m: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *packed, **m),
        lambda **m: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 6, **m),
    ]
    names = [argument.name for argument in _ops.backward._schema.arguments]
    place = names.index("deterministic")
    with mock.patch.object(_autograd, "call", wraps=_autograd.call) as spy:
        for form in forms:
            for asked in (False, True):
                spy.reset_mock()
                form(deterministic=asked).sum().backward()
                (backward,) = [c.args for c in spy.call_args_list if c.args[0] is _ops.backward]
                assert backward[1 + place] is asked


def test_bc57_the_generator_advances(device):
    q = torch.randn(1, 16, 2, 8, device=device)

    def pair():
        torch.manual_seed(4)
        return [flash_attn_func(q, q, q, dropout_p=0.1) for _ in range(2)]

    a, b = pair()
    c, d = pair()
    assert not torch.equal(a, b) and torch.equal(a, c) and torch.equal(b, d)
    torch.manual_seed(4)
    before = torch.dropout(torch.ones(100, device=device), 0.5, True)
    pair()
    after = torch.dropout(torch.ones(100, device=device), 0.5, True)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("p", [1e-16, 1e-5, 0.999])
def test_bc59_extreme_dropout(p, device):
    q = torch.randn(1, 16, 2, 8, device=device)
    out = flash_attn_func(q, q, q, dropout_p=p)
    assert out.isfinite().all()
    if p < 2**-18:
        assert torch.equal(out, flash_attn_func(q, q, q))
    for wrong in (1.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="dropout_p"):
            flash_attn_func(q, q, q, dropout_p=wrong)


def test_bc65_autocast(device):
    """fp32 q with bf16 k, v under autocast, eager and compiled; outside, a TypeError with each
    dtype."""
    q = torch.randn(1, 6, 2, 16, device=device, requires_grad=True)
    k, v = (torch.randn(1, 6, 2, 16, device=device).bfloat16() for _ in "kv")
    for run in (
        flash_attn_func,
        torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True),
    ):
        with torch.autocast(device, torch.bfloat16):
            out = run(q, k, v)
        assert out.dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(out.float().sum(), q)
        assert grad.dtype == torch.float32
    with pytest.raises(TypeError, match="float32.*bfloat16"):
        flash_attn_func(q, k, v)


def test_bc67_functorch(device):
    q, k, v = (torch.randn(2, 16, 2, 32, device=device) for _ in range(3))
    expected = flash_attn_func(q, k, v)
    one = torch.vmap(lambda *x: flash_attn_func(*(t[None] for t in x))[0])(q, k, v)
    torch.testing.assert_close(one, expected)
    grad = torch.func.grad(lambda q: flash_attn_func(q, k, v).sum())(q)
    assert grad.shape == q.shape and grad.isfinite().all()
    _, found = torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))
    _, want = torch.func.jvp(lambda q: flash_attn_func(q, k, v, backend="reference"), (q,), (q,))
    torch.testing.assert_close(found, want)


def test_bc68_double_backward(device):
    q, k, v = (torch.randn(2, 8, 2, 16, device=device, requires_grad=True) for _ in range(3))
    found = []
    for backend in (None, "reference"):
        out = flash_attn_func(q, k, v, backend=backend)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(dq.square().sum(), (q, k, v)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_bc70_export(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    inputs = [torch.randn(2, 9, 2, 8, device=device) for _ in range(3)]
    dims = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2)}
    program = torch.export.export(Attention(), tuple(inputs), dynamic_shapes=(dims, dims, dims))
    program = program.run_decompositions()
    assert sum("flash_attn" in str(node.target) for node in program.graph.nodes) == 1
    inputs = [torch.randn(3, 20, 2, 8, device=device) for _ in range(3)]
    torch.testing.assert_close(program.module()(*inputs), flash_attn_func(*inputs, causal=True))


@pytest.mark.parametrize("paged", [False, True])
def test_bc73_append_beyond_capacity(paged, monkeypatch, device):
    """An integer length raises on every device; a tensor's on the CPU and in checked mode."""
    guarded = [torch.full((3, 16, 2, 8), 5.0, device=device) for _ in "kv"]
    caches, table = [x[1:2] for x in guarded], None
    if paged:
        caches = [x.view(4, 4, 2, 8) for x in caches]
        table = torch.arange(4, dtype=torch.int32, device=device)[None]
    q, new = torch.randn(1, 4, 2, 8, device=device), torch.randn(1, 4, 2, 8, device=device)

    def append(length):
        flash_attn.flash_attn_with_kvcache(
            q, *caches, new, new, cache_seqlens=length, block_table=table, causal=True
        )

    with pytest.raises(ValueError, match="cache_seqlens"):
        append(16)
    monkeypatch.setenv("FLASH_ATTN_CHECK", "1")
    with pytest.raises(ValueError, match="cache_seqlens"):
        append(torch.tensor([16], dtype=torch.int32, device=device))
    assert all((x == 5.0).all() for x in guarded)


@pytest.mark.parametrize("heads", [8, 40])
def test_bc75_alibi_in_training_and_decode(heads, device):
    q, k, v = (torch.randn(2, 32, heads, 16, device=device) for _ in range(3))
    slopes = 2.0 ** -torch.linspace(0.5, 8, heads, device=device)
    for given in (slopes, torch.stack([slopes, slopes.flip(0)])):
        whole = flash_attn_func(q, k, v, causal=True, alibi_slopes=given)
        caches = [torch.zeros(2, 32, heads, 16, device=device) for _ in "kv"]
        for step in range(32):
            one = slice(step, step + 1)
            out = flash_attn.flash_attn_with_kvcache(
                q[:, one],
                *caches,
                k[:, one],
                v[:, one],
                cache_seqlens=step,
                causal=True,
                alibi_slopes=given,
            )
            torch.testing.assert_close(out, whole[:, one])
    half = heads // 2
    part = flash_attn_func(
        *(x[:, :, half:] for x in (q, k, v)), causal=True, alibi_slopes=slopes[half:]
    )
    torch.testing.assert_close(
        part, flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)[:, :, half:]
    )


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 17, 64, 128, 256, 768])
def test_bc76_page_sizes(page_size, device):
    k, v = (torch.randn(1, 333, 2, 16, device=device) for _ in "kv")
    q = torch.randn(1, 3, 4, 16, device=device)
    count = -(-333 // page_size)
    table = torch.randperm(count, device=device)[None]
    pages = []
    for x in (k, v):
        padded = torch.full((count * page_size, 2, 16), float("nan"), device=device)
        padded[:333] = x[0]
        cache = torch.empty(count, page_size, 2, 16, device=device)
        cache[table[0]] = padded.view(count, page_size, 2, 16)
        pages.append(cache)
    found = flash_attn.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=333, block_table=table, causal=True
    )
    torch.testing.assert_close(found, flash_attn_func(q, k, v, causal=True))


def test_bc83_block_lists_without_element_rule(device):
    q = torch.randn(1, 64, 2, 16, device=device)
    counts = torch.tensor([1, 0, 2, 1], device=device)
    indices = torch.tensor([[3, -1], [-1, -1], [0, 2], [1, -1]], device=device)
    mask = BlockMask.from_indices(counts, indices, 16, columns=4)
    dense = torch.zeros(4, 4, dtype=torch.bool, device=device)
    dense[[0, 2, 2, 3], [3, 0, 2, 1]] = True
    wide = dense.repeat_interleave(16, 0).repeat_interleave(16, 1)
    for causal in (False, True):
        found = flash_attn_func(q, q, q, block_mask=mask, causal=causal)
        torch.testing.assert_close(found, flash_attn_func(q, q, q, attn_bias=wide, causal=causal))


@pytest.mark.parametrize("length", [257, 30, 5])
def test_bc84_block_mask_and_odd_lengths(length, device):
    q = torch.randn(1, length, 2, 16, device=device, requires_grad=True)
    blocks = -(-length // 64)
    mask = BlockMask.from_dense(torch.ones(blocks, blocks, dtype=torch.bool, device=device), 64)
    out, lse = flash_attn_func(q, q, q, block_mask=mask, return_lse=True)
    torch.testing.assert_close(out, flash_attn_func(q, q, q))
    assert torch.autograd.grad(out.sum() + lse.sum(), q)[0].isfinite().all()
    large = BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool, device=device), 64)
    with pytest.raises(ValueError, match="block_mask"):
        flash_attn_func(q, q, q, block_mask=large)


def test_bc85_padded_index_lists(device):
    indices = torch.full((2, 16), -1, device=device)
    indices[0, :3] = torch.tensor([2, 0, 1])
    mask = BlockMask.from_indices(torch.tensor([3, 0], device=device), indices, 8, columns=4)
    q = torch.randn(1, 16, 1, 8, device=device, requires_grad=True)
    k = torch.randn(1, 32, 1, 8, device=device)
    out, lse = flash_attn_func(q, k, k, block_mask=mask, return_lse=True)
    assert not out[:, 8:].any() and (lse[:, :, 8:] == NEG_INF).all() and out[:, :8].any()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq.isfinite().all() and not dq[:, 8:].any()
    for wrong in ([1, 1], [0, 4]):
        with pytest.raises(ValueError, match="indices"):
            BlockMask.from_indices(torch.tensor([2]), torch.tensor([wrong]), 8, columns=4)


def test_bc88_metadata():
    if not importlib.metadata.packages_distributions().get("flash_attn"):
        pytest.skip(
            "flash_attn is imported from a source tree: there is no distribution to look at"
        )
    assert importlib.metadata.version("flash-attn") == flash_attn.__version__ == "2.8.3"
    assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]


@pytest.mark.parametrize("environment", [{"CUDA_VISIBLE_DEVICES": ""}, {}])
def test_bc91_import_without_gpu(environment):
    code = (
        "import torch, flash_attn; q = torch.randn(1, 3, 2, 8);"
        "print(flash_attn.flash_attn_func(q, q, q).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    assert "[1, 3, 2, 8]" in done.stdout and "Traceback" not in done.stderr


def test_bc92_messages_name_the_reason():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError) as caught:
        flash_attn_func(q, q, q, backend="sm90")
    text = str(caught.value)
    assert "sm90" in text and "cpu" in text.lower()


@pytest.mark.parametrize(
    "kind", ["int64", "rank", "start", "decreasing", "too_long", "float", "list"]
)
def test_bc93_cu_seqlens_of_the_wrong_kind(kind):
    q = torch.randn(8, 2, 8)
    good = torch.tensor([0, 3, 8], dtype=torch.int32)
    cu = {
        "int64": good.long(),
        "rank": good[None],
        "start": good + 1,
        "decreasing": torch.tensor([0, 9, 8], dtype=torch.int32),
        "too_long": torch.tensor([0, 3, 9], dtype=torch.int32),
        "float": good.float(),
        "list": good.tolist(),
    }[kind]
    if kind == "int64":
        expected = flash_attn_varlen_func(q, q, q, good, good, 5, 5)
        assert torch.equal(flash_attn_varlen_func(q, q, q, cu, cu, 5, 5), expected)
        return
    error = TypeError if kind in ("float", "list") else ValueError
    for pair in ((cu, good), (good, cu)):
        with pytest.raises(error, match="cu_seqlens"):
            flash_attn_varlen_func(q, q, q, *pair, 5, 5)


def test_signatures_are_those_of_fa2():
    """The parameters that others pass, by position and by name; ours are keyword-only."""
    tail = (
        "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
        " return_attn_probs"
    )
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    expected = {
        "flash_attn_func": f"q k v {tail}",
        "flash_attn_kvpacked_func": f"q kv {tail}",
        "flash_attn_qkvpacked_func": f"qkv {tail}",
        "flash_attn_varlen_func": f"q k v {lengths} {tail} block_table",
        "flash_attn_varlen_kvpacked_func": f"q kv {lengths} {tail}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {tail}",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens"
        " cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap"
        " rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    }
    ours = {"attn_bias", "learnable_sink", "s_aux", "block_mask", "return_lse", "backend"}
    for name, names in expected.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == names.split(), name
        keyword = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert keyword == (ours | {"seqused_k"} if "varlen" in name else ours), name
        assert all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
