# SPDX-License-Identifier: BSD-3-Clause
"""What the GPU kernels do with memory: fresh blocks full of NaN change nothing, nothing outside the
tensors is read or written, and the peak grows with the lengths, not with their product."""

import gc

import cases
import pytest
import torch
from conftest import needs_cuda, poison_free_memory
from problem import Problem
from test_kvcache import Cache, Decode, check_decode

import flash_attn
from flash_attn import _autograd

pytestmark = needs_cuda

# Each kind of scratch: splits, the fp32 accumulator of dq, sums of bias, slopes and sinks, delta.
CASES = {
    "plain": cases.Case(2, 200, 300, 4, 4, 64, dtype="bf16"),
    "causal": cases.Case(1, 260, 130, 8, 2, 128, dtype="fp16", causal=True),
    "splits": cases.Case(1, 2, 3000, 8, 2, 64, dtype="bf16"),
    "splits-window": cases.Case(2, 1, 4000, 4, 4, 128, dtype="bf16", window=(2500, 0)),
    "packed": cases.Case(packed=True, seqlen_q=150, seqlen_k=170, dtype="bf16", causal=True),
    "packed-splits": cases.Case(packed=True, seqlen_q=3, seqlen_k=3000, dtype="bf16"),
    "bias": cases.Case(2, 100, 150, 4, 2, 64, dtype="bf16", bias="full", lse_grad=True),
    "bias-column": cases.Case(2, 100, 150, 4, 2, 64, dtype="fp16", bias="column", bias_fp32=True),
    "bias-one": cases.Case(2, 100, 150, 4, 2, 64, dtype="bf16", bias="one", softcap=3.0),
    "scores": cases.Case(
        2, 130, 70, 4, 4, 40, dtype="bf16", slopes="batch", sinks=True, dropout=0.2
    ),
    "blocks": cases.Case(2, 200, 260, 4, 1, 64, dtype="bf16", blocks=(64, 128), sinks=True),
    "bits": cases.Case(1, 200, 260, 4, 4, 128, dtype="bf16", blocks=(64, 64), bits=True),
    "head-dim-256": cases.Case(1, 130, 140, 2, 1, 256, dtype="bf16", causal=True),
    "head-dim-192": cases.Case(1, 130, 140, 4, 4, 192, 128, dtype="fp16"),
    "head-dim-512": cases.Case(1, 70, 140, 2, 1, 512, dtype="bf16"),
    "odd-head-dim": cases.Case(1, 70, 140, 2, 1, 37, 51, dtype="fp16"),
    "fp32": cases.Case(1, 150, 140, 4, 2, 64, dtype="fp32", causal=True),
    "no-keys": cases.Case(2, 70, 0, 4, 2, 64, dtype="bf16", sinks=True),
    "empty-rows": cases.Case(2, 300, 20, 4, 2, 64, dtype="bf16", causal=True),
    "deterministic": cases.Case(1, 300, 300, 8, 2, 64, dtype="bf16", deterministic=True),
}
all_cases = pytest.mark.parametrize("name", CASES)


def run(problem, before_each_pass=lambda: None):
    """out, lse and gradients; the hook runs before the forward and before the backward."""
    before_each_pass()
    out, lse = problem.call(return_lse=True)
    before_each_pass()
    found = {"out": out.detach(), "lse": lse.detach()}
    if problem.case.head_dim <= 256:
        found |= problem.gradients(out, lse, problem.leaves)
    return found


def same(found, expected, rounding=1e-5):
    """The forward always gives the same bits; dq may be summed in another order, and rows that are
    aligned otherwise be read otherwise: `rounding`, a share of the largest value."""
    for name, x in expected.items():
        if name in ("out", "lse"):
            assert torch.equal(found[name], x), name
        else:
            atol = rounding * float(x.abs().max()) if x.numel() else 0.0
            torch.testing.assert_close(found[name], x, rtol=1e-2, atol=atol, msg=name)


# ---- unwritten memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("elements", [1, 100, 5000, 300_000, 20_000_000])
def test_poison_reaches_fresh_tensors(elements, dtype):
    """The means of the tests below: what torch.empty hands out is NaN."""
    poison_free_memory()
    assert torch.empty(elements, dtype=dtype, device="cuda").isnan().all()


@all_cases
def test_poison(name):
    problem = Problem(CASES[name], "cuda")
    expected = run(problem)
    same(run(problem, poison_free_memory), expected)


@pytest.mark.parametrize(
    "case",
    [
        Decode(dtype="bf16", new=1, seqlen_q=1),
        Decode(dtype="bf16", page_size=16, rotary=16, lengths=(13, 0, 29)),
        Decode((2500, 0, 900), 1, 1, dtype="bf16", capacity=2560, page_size=64, dim=64, dim_v=64),
    ],
    ids=lambda case: case.id,
)
def test_poison_decode(case):
    poison_free_memory()
    check_decode(case, "cuda")


def test_poison_seqused_and_spare_rows():
    """Rows that belong to no sequence, keys past a live length: written by nobody but a filler."""
    cu = torch.tensor([0, 100, 180], dtype=torch.int32, device="cuda")
    used = torch.tensor([70, 0], dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(190, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    poison_free_memory()
    out, lse = flash_attn.flash_attn_varlen_func(
        q, k, v, cu, cu, 100, 100, seqused_k=used, return_lse=True
    )
    dout = torch.ones_like(out)
    poison_free_memory()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert out[:100].any() and not out[100:].any() and not dq[100:].any()
    assert lse[:, :100].isfinite().all() and (lse[:, 100:] == float("-inf")).all()
    assert dk[:70].any() and not dk[70:].any() and dv[:70].any() and not dv[70:].any()


# ---- guards


class Guards:
    """Copies of tensors in the middle of buffers: NaN, -1 or True around them."""

    def __init__(self):
        self.buffers = []

    def __call__(self, x):
        if not isinstance(x, torch.Tensor):
            return x
        # Whole and odd numbers of 16 bytes: vector loads may stay possible or not.
        room = 4096 // x.element_size() + 8 * (len(self.buffers) % 2)
        buffer = torch.empty(x.numel() + 2 * room, dtype=x.dtype, device=x.device)
        buffer.view(torch.uint8).fill_(1 if x.dtype == torch.bool else 255)
        inside = buffer[room : room + x.numel()].view(x.shape)
        inside.copy_(x)
        self.buffers.append((buffer, buffer.clone()))
        return inside

    def check(self):
        for buffer, before in self.buffers:
            assert torch.equal(buffer.view(torch.uint8), before.view(torch.uint8))


@all_cases
def test_guards(name, monkeypatch):
    """Every input of both passes between guards: the same results, and no byte of an input or of
    its guards has changed."""
    problem = Problem(CASES[name], "cuda")
    problem.leaves = {  # as they lie between the guards: the layout chooses the kernel
        name: x.detach().contiguous().requires_grad_(x.requires_grad)
        for name, x in problem.leaves.items()
    }
    expected = run(problem)
    guards = Guards()
    problem.leaves = {
        name: guards(x.detach()).requires_grad_(x.requires_grad)
        for name, x in problem.leaves.items()
    }
    problem.cu_q, problem.cu_k = guards(problem.cu_q), guards(problem.cu_k)
    original, seen = _autograd._call_backward, []

    def guarded_backward(*arguments):
        seen.append(len(arguments))
        return original(*map(guards, arguments))

    monkeypatch.setattr(_autograd, "_call_backward", guarded_backward)
    same(run(problem), expected, 2**-8)
    assert bool(seen) == ("dq" in expected)
    guards.check()


@pytest.mark.parametrize(
    "case",
    [
        Decode(dtype="bf16"),
        Decode(dtype="fp16", page_size=3, rotary=16),
        Decode(dtype="bf16", batch_idx=(4, 0, 2), leftpad=(3, 0, 20), rotary=16),
        Decode((16, 3, 24), 9, 1, dtype="bf16", capacity=33, dim=37, dim_v=5),
    ],
    ids=lambda case: case.id,
)
def test_guards_append(case):
    """Around the caches, and in every slot that was not appended to, nothing changes."""
    cache = Cache(case, "cuda")
    *_, k_cache, v_cache = cache.run()
    written = cache.expected(torch.float64)[2]
    for ours, before in ((k_cache, cache.k_cache), (v_cache, cache.v_cache)):
        around = ours._base.clone()
        inside = around[tuple(slice(1, 1 + size) for size in ours.shape)]
        untouched = torch.ones(before.shape[:2], dtype=torch.bool)
        for place in written:
            untouched[place] = False
        assert torch.equal(inside.cpu()[untouched].isnan(), before[untouched].isnan())
        kept = inside.cpu()[untouched].nan_to_num(), before[untouched].nan_to_num()
        assert torch.equal(*kept) and len(written) > 0
        inside.fill_(float("nan"))
        assert around.isnan().all()


@pytest.mark.parametrize("paged", [False, True])
def test_guards_append_past_the_capacity(paged):
    """Lengths that only the GPU knows: an append past the end writes nothing outside the cache."""
    guards = Guards()
    caches = [guards(torch.zeros(4, 16, 2, 8, device="cuda")) for _ in "kv"]
    table = None
    if paged:
        table = torch.tensor([[0, 1], [2, 900]], dtype=torch.int32, device="cuda")
    q, k, v = (torch.ones(2 if paged else 4, 4, 2, 8, device="cuda") for _ in range(3))
    lengths = [30, 14] if paged else [14, 16, 2**31 - 3, -5]
    out = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_table=table,
    )
    torch.cuda.synchronize()
    assert out.isfinite().all()
    for buffer, before in guards.buffers:
        room = 4096 // 4
        assert torch.equal(
            buffer[:room].view(torch.uint8), before[:room].view(torch.uint8)
        ) and torch.equal(buffer[-room:].view(torch.uint8), before[-room:].view(torch.uint8))


# ---- the peak


def peak_of(call):
    """Bytes above what was allocated before, at the highest."""
    torch.cuda.synchronize()
    gc.collect()  # what is freed within the call would hide what it takes
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def training_step(length, heads=2, dim=64, needs=(), lse_grad=False, **options):
    """Peak of forward and backward above the inputs; `needs`: more leaves with a gradient."""
    q, k, v = (
        torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def call():
        out, lse = flash_attn.flash_attn_func(q, k, v, return_lse=True, **options)
        pairs = [(out, torch.empty_like(out).fill_(1))]
        if lse_grad:
            pairs.append((lse, torch.ones_like(lse)))
        results, gradients = zip(*pairs, strict=True)
        torch.autograd.grad(results, (q, k, v, *needs), gradients)

    return peak_of(call)


def banded(length):
    """Three blocks a row: the number of blocks grows as the length."""
    n = length // 128
    near = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= 1
    return flash_attn.BlockMask.from_dense(near, 128).to("cuda")


def leaf(*shape, dtype=torch.float32):
    return torch.zeros(*shape, device="cuda", dtype=dtype, requires_grad=True)


FEATURES = {
    "plain": lambda n: {},
    "causal": lambda n: {"causal": True},
    "window": lambda n: {"window_size": (500, 20)},
    "deterministic": lambda n: {"deterministic": True},
    "softcap-and-lse": lambda n: {"softcap": 9.0, "lse_grad": True},
    "dropout": lambda n: {"dropout_p": 0.1},
    "slopes": lambda n: {"alibi_slopes": leaf(2)},
    "sinks": lambda n: {"learnable_sink": leaf(2)},
    "bias-column": lambda n: {"attn_bias": leaf(1, 1, 1, n, dtype=torch.bfloat16)},
    "bias-row": lambda n: {"attn_bias": leaf(1, 2, n, 1, dtype=torch.bfloat16)},
    "bias-one": lambda n: {"attn_bias": leaf(1, 1, 1, 1)},
    "blocks": lambda n: {"block_mask": banded(n)},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_memory_is_linear(feature):
    """Twice the length, twice the memory: one bit for each pair of positions would show."""
    peaks = []
    for length in (8192, 16_384):
        options = FEATURES[feature](length)
        needs = [x for x in options.values() if isinstance(x, torch.Tensor)]
        training_step(length, needs=needs, **options)  # the first call may keep something
        peaks.append(training_step(length, needs=needs, **options))
    assert 0 < peaks[1] <= 2.05 * peaks[0] + (1 << 20), peaks


def test_memory_of_65536_tokens():
    """Out, dout, dq, dk and dv are 640 MiB; with one fp32 accumulator of dq, lse and delta it is
    the 904 of FlashAttention-2 and cuDNN."""
    for causal in (False, True):
        peak = training_step(65_536, heads=16, causal=causal) / 2**20
        assert 640 < peak <= 920, peak


def test_memory_of_the_forward():
    """out and lse; a split step adds its partial results alone."""
    q, k, v = (torch.randn(1, 16_384, 8, 64, device="cuda").bfloat16() for _ in range(3))
    results = q.numel() * 2 + 8 * 16_384 * 4
    peak = peak_of(lambda: flash_attn.flash_attn_func(q, k, v, causal=True))
    assert results <= peak <= 1.01 * results + (1 << 20)
    peak = peak_of(lambda: flash_attn.flash_attn_func(q[:, :1], k, v))
    assert 0 < peak <= 4 << 20


def test_memory_of_broadcast_inputs():
    """A bias and keys that broadcast are not expanded."""
    length = 8192
    q = torch.randn(1, length, 8, 64, device="cuda").bfloat16()
    k = torch.randn(1, length, 1, 64, device="cuda").bfloat16()
    bias = torch.zeros(1, 1, 1, length, device="cuda").expand(1, 8, length, length)
    wide = k.expand(-1, -1, 8, -1)
    results = q.numel() * 2 + 8 * length * 4
    peak = peak_of(lambda: flash_attn.flash_attn_func(q, wide, wide, attn_bias=bias))
    assert results <= peak <= 1.01 * results + (1 << 20)
