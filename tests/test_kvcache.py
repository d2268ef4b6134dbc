# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn_with_kvcache against caches kept in plain Python: contiguous, paged, append, rotary,
left padding, cache_batch_idx. Unused slots hold NaN everywhere."""

import itertools
import math
from dataclasses import dataclass

import cases
import oracle
import pytest
import torch
from problem import compare, poison, worst

import flash_attn

NAN = float("nan")


@dataclass(frozen=True)
class Decode:
    lengths: tuple = (13, 0, 29)  # before the append
    new: int = 2  # appended keys; 0: no append
    seqlen_q: int = 2
    heads: int = 4
    heads_k: int = 2
    dim: int = 32
    dim_v: int = 32
    dtype: str = "fp32"
    capacity: int = 40
    page_size: int = 0  # 0: contiguous
    rotary: int = 0  # rotary dimensions
    interleaved: bool = True
    leftpad: tuple = ()
    batch_idx: tuple = ()
    causal: bool = True
    window: tuple = (-1, -1)
    softcap: float = 0.0
    slopes: bool = False
    bias: bool = False
    sinks: bool = False
    blocks: bool = False
    aligned: bool = False  # poison(aligned=True)

    @property
    def id(self):
        default = Decode()
        changed = [f"{n}{v}" for n, v in vars(self).items() if v != getattr(default, n)]
        return "-".join(changed).replace(" ", "").replace("True", "") or "default"


def rotate(x, position, cos, sin, interleaved):
    """One row x (heads, dim) at one position."""
    half = cos.shape[1]
    c, s = cos[position], sin[position]
    out = x.clone()
    if interleaved:
        a, b = x[:, 0 : 2 * half : 2], x[:, 1 : 2 * half : 2]
        out[:, 0 : 2 * half : 2], out[:, 1 : 2 * half : 2] = a * c - b * s, b * c + a * s
    else:
        a, b = x[:, :half], x[:, half : 2 * half]
        out[:, :half], out[:, half : 2 * half] = a * c - b * s, b * c + a * s
    return out


class Cache:
    """One problem: the caches, and what each batch entry's live slots hold."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        self.rng = torch.Generator().manual_seed(7)
        self.dtype = cases.DTYPES[case.dtype]
        self.batch = len(case.lengths)
        entries = self.batch + 2 if case.batch_idx else self.batch
        c = case
        if c.page_size:
            per = -(-c.capacity // c.page_size)
            pages = self.batch * per + 2
            order = torch.randperm(pages, generator=self.rng)[: self.batch * per]
            self.table = order.view(self.batch, per).int()
            shape = (pages, c.page_size)
        else:
            self.table, shape = None, (entries, c.capacity)
        self.k_cache = torch.full((*shape, c.heads_k, c.dim), NAN, dtype=self.dtype)
        self.v_cache = torch.full((*shape, c.heads_k, c.dim_v), NAN, dtype=self.dtype)
        self.old = []
        for b, n in enumerate(c.lengths):
            k, v = self.draw(n, c.heads_k, c.dim), self.draw(n, c.heads_k, c.dim_v)
            for j in range(c.leftpad[b] if c.leftpad else 0, n):
                self.k_cache[self.place(b, j)], self.v_cache[self.place(b, j)] = k[j], v[j]
            self.old.append((k, v))
        self.q = self.draw(self.batch, c.seqlen_q, c.heads, c.dim)
        self.k = self.draw(self.batch, c.new, c.heads_k, c.dim) if c.new else None
        self.v = self.draw(self.batch, c.new, c.heads_k, c.dim_v) if c.new else None
        angle = torch.rand(c.capacity + 3, c.rotary // 2, generator=self.rng) * 6
        self.cos = angle.cos().to(self.dtype) if c.rotary else None
        self.sin = angle.sin().to(self.dtype) if c.rotary else None
        self.slopes = (
            torch.rand(self.batch, c.heads, generator=self.rng) * 0.2 if c.slopes else None
        )
        self.sinks = self.draw(c.heads) if c.sinks else None
        room = self.table.shape[1] * c.page_size if c.page_size else c.capacity
        self.bias = self.draw(self.batch, 1, c.seqlen_q, room) if c.bias else None
        self.blocks = None
        if c.blocks:
            counts = (-(-c.seqlen_q // 2), -(-room // 8))
            self.blocks = torch.rand(1, c.heads, *counts, generator=self.rng) < 0.6

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.rng).to(self.dtype)

    def place(self, b, slot):
        if self.table is not None:
            size = self.case.page_size
            return int(self.table[b, slot // size]), slot % size
        return self.case.batch_idx[b] if self.case.batch_idx else b, slot

    def to(self, x):
        return None if x is None else x.to(self.device)

    def run(self, backend=None):
        """Calls ours; returns (out, lse, k_cache, v_cache)."""
        c = self.case
        args = {"causal": c.causal, "window_size": c.window, "softcap": c.softcap}
        args |= {"alibi_slopes": self.to(self.slopes), "attn_bias": self.to(self.bias)}
        args |= {"learnable_sink": self.to(self.sinks), "backend": backend}
        args["cache_seqlens"] = self.to(torch.tensor(c.lengths, dtype=torch.int32))
        if c.leftpad:
            args["cache_leftpad"] = self.to(torch.tensor(c.leftpad, dtype=torch.int32))
        if c.batch_idx:
            args["cache_batch_idx"] = self.to(torch.tensor(c.batch_idx, dtype=torch.int32))
        if self.blocks is not None:
            args["block_mask"] = flash_attn.BlockMask.from_dense(self.to(self.blocks), (2, 8))
        caches = [
            poison(self.to(x), swap=False, aligned=c.aligned) for x in (self.k_cache, self.v_cache)
        ]
        out, lse = flash_attn.flash_attn_with_kvcache(
            poison(self.to(self.q)),
            *caches,
            *(None if x is None else poison(self.to(x)) for x in (self.k, self.v)),
            rotary_cos=self.to(self.cos),
            rotary_sin=self.to(self.sin),
            block_table=self.to(self.table),
            rotary_interleaved=c.interleaved,
            return_softmax_lse=True,
            **args,
        )
        return out, lse, *caches

    def expected(self, dtype):
        """(out, lse, {place: (k row, v row)} of what was appended), evaluated in dtype."""
        c, outs, lses, written = self.case, [], [], {}
        for b, length in enumerate(c.lengths):
            k, v = (x.to(dtype) for x in self.old[b])
            q = self.q[b].to(dtype)
            if c.new:
                rows = self.k[b].to(dtype)
                if c.rotary:
                    tables = self.cos.to(dtype), self.sin.to(dtype)
                    rows = torch.stack(
                        [rotate(x, length + i, *tables, c.interleaved) for i, x in enumerate(rows)]
                    ).to(self.dtype)
                for i in range(c.new):
                    written[self.place(b, length + i)] = rows[i], self.v[b, i]
                k, v = torch.cat([k, rows.to(dtype)]), torch.cat([v, self.v[b].to(dtype)])
            if c.rotary:
                moving = c.causal or c.window != (-1, -1)
                q = torch.stack(
                    [
                        rotate(x, length + i * moving, *tables, c.interleaved)
                        for i, x in enumerate(q)
                    ]
                )
                q = q.to(self.dtype).to(dtype)  # a rotated query is rounded to the input's dtype
            total, first = length + c.new, min(c.leftpad[b] if c.leftpad else 0, length + c.new)
            rule = oracle.Rule(1 / math.sqrt(c.dim), (c.window[0], 0 if c.causal else c.window[1]))
            rule.softcap = c.softcap
            # Positions are absolute slots: keep all slots and hide those before the first live one.
            k, v = k.clone(), v.clone()
            k[:first], v[:first] = 0, 0
            bias = torch.zeros(1, 1, 1, total, dtype=dtype)
            if c.bias:
                bias = bias + self.bias[b : b + 1, :, :, :total].to(dtype)
            bias[..., :first] = float("-inf")
            if self.blocks is not None:
                rule.blocks, rule.block_size = self.blocks, (2, 8)
            slopes = None if self.slopes is None else self.slopes[b : b + 1]
            out, lse = oracle.attend(rule, q[None], k[None], v[None], bias, slopes, self.sinks)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses), written


def check_decode(case, device, backend=None):
    cache = Cache(case, device)
    out, lse, k_cache, v_cache = cache.run(backend)
    exact_out, exact_lse, written = cache.expected(torch.float64)
    found = {"out": (out, exact_out), "lse": (lse, exact_lse)}
    low = cache.expected(cache.dtype)
    references = dict(zip(found, low[:2], strict=True))
    compare(
        {
            name: [(x.cpu(), exact, [worst(references[name], exact)[0]])]
            for name, (x, exact) in found.items()
        },
        case.id,
    )
    # The caches: what was appended, and nothing else changed.
    for ours, before, index in ((k_cache, cache.k_cache, 0), (v_cache, cache.v_cache, 1)):
        expected = before.clone()
        for place, rows in written.items():
            expected[place] = rows[index].to(expected.dtype)
        rounding = {"bf16": 2**-7, "fp16": 2**-10, "fp32": 1e-6, "fp64": 1e-12}[case.dtype]
        rtol = rounding if case.rotary and index == 0 else 0
        torch.testing.assert_close(ours.cpu(), expected, rtol=rtol, atol=rtol, equal_nan=True)


SMALL = {"lengths": (5, 0, 12), "capacity": 16}
CASES = [
    Decode(),
    Decode(dtype="bf16", seqlen_q=1, new=1),
    Decode(dtype="fp16", new=0, lengths=(40, 1, 17)),
    Decode(dtype="fp64", new=3, seqlen_q=5),
    Decode(
        lengths=(200, 64, 1, 130),
        capacity=260,
        dtype="bf16",
        new=1,
        seqlen_q=1,
        heads=8,
        dim=64,
        dim_v=64,
    ),
    Decode(dim=48, dim_v=24, dtype="bf16"),
    Decode(dim=7, dim_v=5),
    Decode(causal=False),
    Decode(window=(6, 0), seqlen_q=4, new=4),
    Decode(causal=False, window=(5, 2), dtype="bf16"),
    Decode(softcap=2.0, slopes=True),
    Decode(bias=True, sinks=True, dtype="bf16"),
    Decode(blocks=True, heads_k=4, seqlen_q=4, new=4),
    Decode(rotary=16),
    Decode(rotary=32, interleaved=False, dtype="bf16"),
    Decode(rotary=16, causal=False, seqlen_q=3, new=3),
    Decode(rotary=16, causal=False, window=(4, -1), interleaved=False, seqlen_q=3, new=3),
    Decode(leftpad=(3, 0, 20)),
    Decode(leftpad=(13, 0, 29), new=0, lengths=(13, 0, 29), sinks=True),
    Decode(leftpad=(3, 0, 20), rotary=16, dtype="bf16", slopes=True),
    Decode(leftpad=(3, 0, 20), bias=True, blocks=True, window=(9, 0)),
    Decode(batch_idx=(4, 0, 2)),
    Decode(batch_idx=(4, 0, 2), leftpad=(3, 0, 20), rotary=16, interleaved=False),
    Decode(heads=12, heads_k=3, seqlen_q=6, new=6),
    Decode(heads=8, heads_k=1, seqlen_q=1, new=0, lengths=(40, 3, 1)),
]
PAGED = [
    Decode(page_size=size, dtype=dtype, **more)
    for (size, dtype), more in zip(
        [
            (1, "fp32"),
            (3, "bf16"),
            (8, "fp32"),
            (16, "bf16"),
            (17, "fp32"),
            (64, "fp16"),
            (128, "fp64"),
            (256, "fp32"),
            (768, "bf16"),
        ],
        itertools.cycle(
            [
                {},
                {"rotary": 16, "new": 3, "seqlen_q": 3},
                {"slopes": True, "window": (7, 0)},
                {"bias": True, "sinks": True, "new": 0},
                {"blocks": True, "softcap": 1.0, "seqlen_q": 4, "new": 4},
            ]
        ),
        strict=False,
    )
]


@pytest.mark.parametrize("case", CASES + PAGED, ids=lambda case: case.id)
def test_kvcache(case, device):
    check_decode(case, device)


@pytest.mark.parametrize("case", CASES[:2] + PAGED[:2], ids=lambda case: case.id)
def test_kvcache_reference_backend(case, device):
    check_decode(case, device, backend="reference")


def make(device, entries=2, capacity=16, page=None, **changes):
    """A small valid call's arguments, to be broken or bent."""
    args = {
        "q": torch.randn(entries, 1, 2, 8, device=device),
        "k_cache": torch.randn(entries, capacity, 2, 8, device=device),
        "v_cache": torch.randn(entries, capacity, 2, 8, device=device),
        "k": torch.randn(entries, 1, 2, 8, device=device),
        "v": torch.randn(entries, 1, 2, 8, device=device),
        "cache_seqlens": torch.full((entries,), 3, dtype=torch.int32, device=device),
    }
    return args | changes


def test_kvcache_integer_length_equals_tensor(device):
    args = make(device)
    caches = [args["k_cache"].clone(), args["v_cache"].clone()]
    a = flash_attn.flash_attn_with_kvcache(**args)
    b = flash_attn.flash_attn_with_kvcache(
        **args | {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": 3}
    )
    assert torch.equal(a, b) and torch.equal(caches[0], args["k_cache"])


def test_kvcache_int64_accepted(device):
    args = make(device, k=None, v=None)
    expected = flash_attn.flash_attn_with_kvcache(**args)
    args["cache_seqlens"] = args["cache_seqlens"].long()
    assert torch.equal(flash_attn.flash_attn_with_kvcache(**args), expected)
    table = torch.arange(4, device=device).view(2, 2)
    paged = {name: args[name].view(4, 8, 2, 8) for name in ("k_cache", "v_cache")}
    assert torch.equal(
        flash_attn.flash_attn_with_kvcache(**args | paged, block_table=table), expected
    )


def test_kvcache_no_length_means_all(device):
    args = make(device, k=None, v=None, cache_seqlens=None)
    expected = flash_attn.flash_attn_func(args["q"], args["k_cache"], args["v_cache"])
    torch.testing.assert_close(flash_attn.flash_attn_with_kvcache(**args), expected)


@pytest.mark.parametrize("length", [14, 16, 17, -1])
@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("paged", [False, True])
def test_kvcache_capacity(length, kind, paged, monkeypatch, device):
    """An append past the capacity raises and writes nothing; guards around the cache stay."""
    if kind == "tensor":
        monkeypatch.setenv("FLASH_ATTN_CHECK", "1")
    args = make(device, k=torch.randn(2, 4, 2, 8, device=device))
    args["v"] = torch.randn(2, 4, 2, 8, device=device)
    guarded = [torch.full((4, 16, 2, 8), 9.0, device=device) for _ in "kv"]
    caches = [x[1:3] for x in guarded]
    if paged:
        caches = [x.view(4, 8, 2, 8) for x in caches]
        args["block_table"] = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
    args |= {"k_cache": caches[0], "v_cache": caches[1]}
    lengths = torch.tensor([2, length], dtype=torch.int32, device=device)
    args["cache_seqlens"] = length if kind == "int" else lengths
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(**args)
    assert all((x == 9.0).all() for x in guarded)


def test_kvcache_exactly_full(device):
    args = make(device, cache_seqlens=torch.tensor([15, 0], dtype=torch.int32, device=device))
    flash_attn.flash_attn_with_kvcache(**args)
    assert torch.equal(args["k_cache"][0, 15], args["k"][0, 0])


def test_kvcache_padding_sequence(device):
    """A row of -1 in the block table: nothing read, nothing written, out 0."""
    args = make(device)
    pages = {name: args[name].view(4, 8, 2, 8) for name in ("k_cache", "v_cache")}
    table = torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32, device=device)
    before = pages["k_cache"].clone()
    out, lse = flash_attn.flash_attn_with_kvcache(
        **args | pages, block_table=table, return_softmax_lse=True
    )
    assert not out[1].any() and (lse[1] == float("-inf")).all() and out[0].any()
    before[0, 3] = args["k"][0, 0]
    assert torch.equal(pages["k_cache"], before)


@pytest.mark.parametrize("page", [9, -2])
def test_kvcache_page_out_of_range(page, monkeypatch, device):
    monkeypatch.setenv("FLASH_ATTN_CHECK", "1")
    args = make(device)
    pages = {name: args[name].view(4, 8, 2, 8) for name in ("k_cache", "v_cache")}
    before = pages["k_cache"].clone()
    table = torch.tensor([[0, 1], [page, 3]], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="block_table"):
        flash_attn.flash_attn_with_kvcache(**args | pages, block_table=table)
    assert torch.equal(pages["k_cache"], before)


def test_kvcache_page_of_an_unused_slot_may_be_anything(device):
    """Only pages that hold live slots are looked at."""
    args = make(device, k=None, v=None)
    pages = {name: args[name].view(4, 8, 2, 8) for name in ("k_cache", "v_cache")}
    table = torch.tensor([[0, -1], [2, -1]], dtype=torch.int32, device=device)
    expected = flash_attn.flash_attn_with_kvcache(**args)
    found = flash_attn.flash_attn_with_kvcache(**args | pages, block_table=table)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["q", "k_cache", "k"])
def test_kvcache_has_no_backward(name, device):
    args = make(device)
    args[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward"):
        flash_attn.flash_attn_with_kvcache(**args)
    with torch.no_grad():
        flash_attn.flash_attn_with_kvcache(**args)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7])
def test_kvcache_num_splits(num_splits, device):
    """A hint: the answer stays within rounding."""
    args = make(device, k=None, v=None)
    expected = flash_attn.flash_attn_with_kvcache(**args)
    found = flash_attn.flash_attn_with_kvcache(**args, num_splits=num_splits)
    torch.testing.assert_close(found, expected)


def test_kvcache_token_by_token_equals_one_pass(device):
    """Decoding step by step through the cache gives the rows of one causal pass."""
    q, k, v = (torch.randn(1, 20, 2, 16, device=device) for _ in range(3))
    slopes = torch.tensor([0.3, 0.1], device=device)
    whole = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    caches = [torch.full((1, 24, 2, 16), NAN, device=device) for _ in "kv"]
    for step in range(20):
        one = slice(step, step + 1)
        out = flash_attn.flash_attn_with_kvcache(
            q[:, one],
            *caches,
            k[:, one],
            v[:, one],
            cache_seqlens=step,
            causal=True,
            alibi_slopes=slopes,
        )
        torch.testing.assert_close(out, whole[:, one])
