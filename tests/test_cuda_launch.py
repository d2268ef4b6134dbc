# SPDX-License-Identifier: BSD-3-Clause
"""How a call behaves on a GPU: CUDA graphs, streams, threads, other devices, checkpointing,
autocast, torch.compile, the same bits each run. Never a synchronisation."""

import threading

import cases
import pytest
import torch
from conftest import needs_cuda, poison_free_memory
from problem import Problem

from flash_attn import BlockMask, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = needs_cuda


def normal(*shape, dtype=torch.bfloat16, grad=False):
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(grad)


def capture(run):
    """(graph, its results): two runs on a side stream first, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def call_of(kind):
    """(function of nothing: out, lse and gradients; the leaves it reads)."""
    options, extra = {}, []
    if kind == "packed":
        q, k, v = (normal(300, 4, 64, grad=True) for _ in range(3))
        cu = torch.tensor([0, 7, 7, 130, 290], dtype=torch.int32, device="cuda")

        def attend():
            return flash_attn_varlen_func(q, k, v, cu, cu, causal=True, return_lse=True)
    else:
        len_q, len_k = (2, 4000) if kind == "splits" else (200, 300)
        q, k, v = (normal(2, n, 4, 64, grad=True) for n in (len_q, len_k, len_k))
        if kind == "scores":
            extra = [normal(1, 4, 200, 300, grad=True), torch.rand(4, device="cuda")]
            extra += [torch.randn(4, device="cuda")]
            extra = [extra[0], *(x.requires_grad_() for x in extra[1:])]
            names = ("attn_bias", "alibi_slopes", "learnable_sink")
            options = dict(zip(names, extra, strict=True)) | {"softcap": 5.0}
        elif kind == "blocks":
            blocks = torch.rand(2, 4, 4, 3, device="cuda") < 0.6
            options = {"block_mask": BlockMask.from_dense(blocks, (64, 128))}
        elif kind == "deterministic":
            options = {"deterministic": True, "causal": True}

        def attend():
            return flash_attn_func(q, k, v, return_lse=True, **options)

    leaves = [q, k, v, *extra]
    dout = torch.randn_like(attend()[0])

    def run():
        out, lse = attend()
        return out, lse, *torch.autograd.grad((out, lse.float()), leaves, (dout, lse * 0 + 0.1))

    if kind == "packed":  # lse of spare rows is -inf

        def run():
            out, lse = attend()
            return out, lse, *torch.autograd.grad(out, leaves, dout)

    return run, leaves


KINDS = ["plain", "packed", "splits", "scores", "blocks", "deterministic"]


def assert_same(found, expected):
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(found[2:], expected[2:], strict=True):  # dq may be summed in another order
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5 * float(b.abs().max()))


# ---- graphs


@pytest.mark.parametrize("kind", KINDS)
def test_graph_replays_equal_eager(kind):
    run, leaves = call_of(kind)
    graph, results = capture(run)
    for _ in range(3):
        with torch.no_grad():
            for x in leaves:
                x.normal_()
        graph.replay()
        assert_same(results, run())


def one_hot_run():
    """Forward and backward whose results show which probabilities each of them kept."""
    q = torch.zeros(2, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(64, device="cuda").bfloat16()[None, :, None].repeat(2, 1, 2, 1).requires_grad_()

    def run():
        out = flash_attn_func(q, q, v, dropout_p=0.5)
        (dv,) = torch.autograd.grad(out, v, v.detach())
        return out.transpose(1, 2) != 0, dv.permute(0, 2, 3, 1) != 0

    return run


def test_bc56_graph_draws_a_fresh_dropout_mask_each_replay():
    run = one_hot_run()  # holds the inputs that the graph reads
    graph, (forward, backward) = capture(run)
    masks = []
    for seed in (1, None, None, 1):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        assert torch.equal(forward, backward)
        assert 0.4 < forward.float().mean() < 0.6
        masks.append(forward.clone())
    assert torch.equal(masks[0], masks[3])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("paged", [False, True])
def test_graph_of_a_decode_step(paged):
    """Lengths are read at replay: a step captured once serves every later one."""
    batch, capacity, page = 3, 512, 16
    shape = (batch * capacity // page, page, 2, 64) if paged else (batch, capacity, 2, 64)
    caches = [normal(*shape) for _ in "kv"]
    eager_caches = [x.clone() for x in caches]
    table = None
    if paged:
        table = torch.randperm(batch * capacity // page, device="cuda").view(batch, -1).int()
    q, k, v = normal(batch, 1, 8, 64), normal(batch, 1, 2, 64), normal(batch, 1, 2, 64)
    lengths = torch.tensor([0, 17, 400], dtype=torch.int32, device="cuda")

    def step(caches, lengths):
        return flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    graph, result = capture(lambda: step(caches, lengths))
    for jump in (0, 1, 1, 60):
        lengths += jump
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        expected = step(eager_caches, lengths)
        assert torch.equal(result, expected) and result.isfinite().all()
        for a, b in zip(caches, eager_caches, strict=True):
            assert torch.equal(a, b)


# ---- no synchronisation, streams, threads


@pytest.mark.parametrize("kind", KINDS)
def test_stream_is_torch_current_one(kind):
    """Behind a long kernel of a side stream the call sees what is written before it, waits for
    nothing, and its scratch is not handed to the main stream meanwhile."""
    run, leaves = call_of(kind)
    values = [torch.randn_like(x) for x in leaves]
    with torch.no_grad():
        for x, value in zip(leaves, values, strict=True):
            x.copy_(value)
    expected = run()
    with torch.no_grad():
        for x in leaves:
            x.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for x, value in zip(leaves, values, strict=True):
                x.copy_(value)
        found = run()
        event = side.record_event()
    assert not event.query(), "the call waited for the GPU"
    blocks = [
        torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)
        for _ in range(8)
    ]
    side.synchronize()
    assert_same(found, expected)
    assert len(blocks) == 32


def test_stream_calls_do_not_synchronise():
    """Forward, backward, packed calls without max_seqlen, block masks at hand, decode steps."""
    runs = [call_of(kind)[0] for kind in KINDS]
    q, cache = normal(2, 1, 4, 64), normal(2, 64, 4, 64)
    lengths = torch.full((2,), 7, dtype=torch.int32, device="cuda")
    runs.append(
        lambda: flash_attn_with_kvcache(
            q, cache, cache.clone(), q, q, cache_seqlens=lengths, causal=True
        )
    )
    runs.append(lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5))
    runs.append(lambda: flash_attn_func(q, q, q, dropout_p=0.1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for run in runs:
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_stream_backward_runs_where_the_forward_ran():
    """The gradient of a result made on a side stream, asked for from the main one."""
    q, k, v = (normal(2, 128, 4, 64, grad=True) for _ in range(3))
    expected = torch.autograd.grad(flash_attn_func(q, k, v).float().sum(), (q, k, v))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = flash_attn_func(q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    found = torch.autograd.grad(out.float().sum(), (q, k, v))
    torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)


def test_threads_each_with_a_stream():
    """Four Python threads at once: nothing is shared between calls."""
    inputs = [[normal(2, 150, 4, 64) for _ in range(3)] for _ in range(4)]
    expected = [flash_attn_func(*x, causal=True) for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                out = flash_attn_func(*inputs[index], causal=True)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, expected[index]):
                    wrong.append(index)
                    return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU: the device guard is NOT tested")
def test_bc71_second_device():
    """Tensors on another device than the current one, backward and autograd's own thread too."""
    q, k, v = (torch.randn(2, 70, 4, 64, device="cuda").bfloat16() for _ in range(3))
    found = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        out, lse = flash_attn_func(*leaves, causal=True, deterministic=True, return_lse=True)
        grads = torch.autograd.grad(out.float().sum(), leaves)
        cu = torch.tensor([0, 50, 140], dtype=torch.int32, device=device)
        flat = [x.detach().flatten(0, 1) for x in leaves]
        packed = flash_attn_varlen_func(*flat, cu, cu, 90, 90)
        caches = [x.detach().clone() for x in leaves[1:]]
        lengths = torch.tensor([3, 60], dtype=torch.int32, device=device)
        new = [x.detach()[:, :1] for x in leaves]
        step = flash_attn_with_kvcache(new[0], *caches, *new[1:], cache_seqlens=lengths)
        found.append([x.cpu() for x in (out, lse, *grads, packed, step, *caches)])
        assert torch.cuda.current_device() == 0
        assert out.device == torch.device(device)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="device"):
        flash_attn_func(q, k.to("cuda:1"), v)


# ---- training machinery


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropout_mask(reentrant):
    leaves = [normal(2, 90, 4, 64, grad=True) for _ in range(3)]
    dout = normal(2, 90, 4, 64)

    def run(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.3, causal=True, deterministic=True)

    def gradients(call):
        torch.manual_seed(5)
        out = call()
        torch.rand(100, device="cuda")  # the generator moves on before the backward pass
        for x in leaves:
            x.grad = None
        out.backward(dout)
        return [out.detach(), *(x.grad for x in leaves)]

    expected = gradients(lambda: run(*leaves))
    found = gradients(
        lambda: torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=reentrant)
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """fp32 leaves run in the autocast dtype, gradients come back in fp32."""
    leaves = [normal(2, 40, 4, 64, dtype=torch.float32, grad=True) for _ in range(3)]
    with torch.autocast("cuda", dtype):
        out = flash_attn_func(*leaves, causal=True)
    low = [x.detach().to(dtype).requires_grad_() for x in leaves]
    expected = flash_attn_func(*low, causal=True)
    assert out.dtype == dtype and torch.equal(out, expected)
    found = torch.autograd.grad(out.float().sum(), leaves)
    wanted = torch.autograd.grad(expected.float().sum(), low)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float(), rtol=1e-2, atol=1e-5)


class Layer(torch.nn.Module):
    """A small attention layer with everything that users put around one."""

    def __init__(self, heads=4, dim=32):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm = torch.nn.LayerNorm(heads * dim)
        self.project = torch.nn.Linear(heads * dim, 3 * heads * dim)
        self.sinks = torch.nn.Parameter(torch.zeros(heads))
        self.out = torch.nn.Linear(heads * dim, heads * dim)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).unflatten(2, (3, self.heads, self.dim)).unbind(2)
        y = flash_attn_func(
            q, k, v, causal=True, window_size=(50, 0), learnable_sink=self.sinks.to(q.dtype)
        )
        return x + self.out(y.flatten(2))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_a_training_step(mode):
    """Inductor, and inductor under CUDA graphs: as near to fp32 eager as bf16 eager is."""
    torch.compiler.reset()
    layer = Layer().cuda()
    x = torch.randn(2, 100, 128, device="cuda")

    def step(module):
        layer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            module(x).float().square().mean().backward()
        return [p.grad.clone() for p in layer.parameters()]

    eager = step(layer)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(3):
        for a, b in zip(step(compiled), eager, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * float(b.abs().max()))


# ---- the same bits


BITS = {
    "plain": cases.Case(2, 900, 1000, 4, 4, 64, dtype="bf16"),
    "causal-gqa": cases.Case(1, 1500, 1500, 8, 1, 128, dtype="bf16", causal=True),
    "window-fp16": cases.Case(1, 1100, 1300, 4, 2, 64, dtype="fp16", window=(200, 30)),
    "packed": cases.Case(packed=True, seqlen_q=700, seqlen_k=800, dtype="bf16", causal=True),
    "bias": cases.Case(2, 300, 500, 4, 2, 64, dtype="bf16", bias="one", sinks=True, slopes="heads"),
    "bias-head": cases.Case(3, 200, 333, 4, 2, 64, dtype="bf16", bias="head", dropout=0.2),
    "blocks": cases.Case(2, 700, 900, 4, 2, 64, dtype="bf16", blocks=(64, 64), lse_grad=True),
    "head-dim-256": cases.Case(1, 500, 600, 4, 2, 256, dtype="bf16", softcap=4.0),
    "fp32": cases.Case(1, 500, 600, 4, 2, 64, dtype="fp32", causal=True),
    "splits": cases.Case(1, 3, 9000, 4, 2, 64, dtype="bf16", sinks=True),
}


@pytest.mark.parametrize("name", BITS)
def test_bits_are_those_of_every_run(name):
    """Forward always, gradients with deterministic=True; with other work in between."""
    problem, runs = Problem(BITS[name], "cuda"), []
    for index in range(5):
        if index % 2:
            poison_free_memory()
        out, lse = problem.call(return_lse=True, deterministic=True)
        runs.append({"out": out, "lse": lse} | problem.gradients(out, lse, problem.leaves))
        plain = problem.call(return_lse=True)
        assert torch.equal(plain[0], out) and torch.equal(plain[1], lse)
    for found in runs[1:]:
        for key, x in runs[0].items():
            assert torch.equal(found[key], x), key


def test_bc55_dk_and_dv_without_the_flag():
    """No atomic touches dk and dv of plain attention; dq stays within rounding."""
    problem = Problem(cases.Case(20, 512, 128, 1, 1, 128, dtype="fp16"), "cuda")
    first = problem.ours()
    for _ in range(20):
        found = problem.ours()
        assert torch.equal(found["dk"], first["dk"]) and torch.equal(found["dv"], first["dv"])
        torch.testing.assert_close(found["dq"], first["dq"], rtol=2e-3, atol=1e-3)
