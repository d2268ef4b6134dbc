# SPDX-License-Identifier: BSD-3-Clause
"""Wrong calls and what each gets. test_errors.py runs every row; `python tests/errors_table.py`
prints them as a table."""

import warnings
from dataclasses import dataclass, field

import torch

import flash_attn


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def dense(**changes):
    args = {"q": rand(2, 6, 4, 16), "k": rand(2, 9, 2, 16), "v": rand(2, 9, 2, 16)}
    return flash_attn.flash_attn_func(**args | changes)


def packed(**changes):
    args = {"q": rand(7, 4, 16), "k": rand(9, 2, 16), "v": rand(9, 2, 16), "max_seqlen_q": 4}
    args |= {"cu_seqlens_q": ints(0, 3, 7), "cu_seqlens_k": ints(0, 5, 9), "max_seqlen_k": 5}
    return flash_attn.flash_attn_varlen_func(**args | changes)


def cached(**changes):
    args = {"q": rand(2, 1, 4, 16), "k": rand(2, 1, 2, 16), "v": rand(2, 1, 2, 16)}
    args |= {
        "k_cache": rand(2, 8, 2, 16),
        "v_cache": rand(2, 8, 2, 16),
        "cache_seqlens": ints(3, 5),
    }
    return flash_attn.flash_attn_with_kvcache(**args | changes)


def pages(**changes):
    args = {"k_cache": rand(4, 4, 2, 16), "v_cache": rand(4, 4, 2, 16)}
    return cached(**args | {"block_table": ints(0, 1, 2, 3).view(2, 2)} | changes)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def blocks(rows, columns, size=4):
    return flash_attn.BlockMask.from_dense(torch.ones(rows, columns, dtype=torch.bool), size)


@dataclass
class Wrong:
    title: str
    call: object
    error: type
    text: str  # must stand in the message
    arguments: dict = field(default_factory=dict)

    def run(self):
        return self.call(**self.arguments)


def w(call, error, text, title=None, **arguments):
    shown = ", ".join(f"{name}={describe(value)}" for name, value in arguments.items())
    name = getattr(call, "__name__", str(call))
    return Wrong(title or f"{name}({shown})", call, error, text, arguments)


def describe(value):
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        small = value.numel() <= 4 and value.dim() <= 1 and not value.is_floating_point()
        return str(value.tolist()) if small else f"{dtype}{list(value.shape)}"
    return repr(value)


V, T, N = ValueError, TypeError, NotImplementedError
BF16, F64 = torch.bfloat16, torch.float64

ROWS = [
    # q, k, v
    w(dense, V, "q must have shape", q=rand(6, 4, 16)),
    w(dense, V, "v must have shape", v=rand(9, 2, 16)),
    w(dense, T, "q must be a torch.Tensor", q=[[1.0]]),
    w(dense, T, "one dtype", k=rand(2, 9, 2, 16, dtype=BF16)),
    w(
        dense,
        T,
        "float16, bfloat16",
        **{n: torch.ones(2, 6, 2, 16, dtype=torch.int32) for n in "qkv"},
    ),
    w(dense, V, "head_dim", k=rand(2, 9, 2, 8)),
    w(dense, V, "multiple of num_heads_k", k=rand(2, 9, 3, 16), v=rand(2, 9, 3, 16)),
    w(dense, V, "num_heads", k=rand(2, 9, 0, 16), v=rand(2, 9, 0, 16)),
    w(dense, V, "k and v must agree", v=rand(2, 8, 2, 16)),
    w(dense, V, "batch", k=rand(3, 9, 2, 16), v=rand(3, 9, 2, 16)),
    w(dense, V, "at least 1", **{n: rand(2, 6, 2, 0) for n in "qkv"}),
    w(dense, V, "device", k=rand(2, 9, 2, 16).to("meta")),
    # numbers
    w(dense, V, "0 <= dropout_p < 1", dropout_p=1.0),
    w(dense, V, "0 <= dropout_p < 1", dropout_p=-0.1),
    w(dense, V, "dropout_p", dropout_p=float("nan")),
    w(dense, V, "softmax_scale", softmax_scale=float("nan")),
    w(dense, T, "softmax_scale", softmax_scale="0.1"),
    w(dense, V, "softcap", softcap=-1.0),
    w(dense, V, "-1 for unlimited", causal=True, window_size=(-1, -3)),
    w(dense, V, "two ints", window_size=(1, 2, 3)),
    w(dense, T, "window_size", window_size=5),
    w(dense, T, "window_size", window_size=(1.5, 2)),
    w(dense, T, "window_size", window_size=torch.tensor([1.0, 2.0])),
    # backend
    w(dense, V, "backend must be one of", backend="sm70"),
    w(dense, N, "sm80", backend="sm80"),
    w(dense, T, "backend", backend=90),
    # bias, slopes, sinks, block masks
    w(dense, V, "broadcastable", attn_bias=rand(2, 4, 6, 8)),
    w(dense, V, "at most 4", attn_bias=rand(1, 2, 4, 6, 9)),
    w(dense, T, "attn_bias must be", attn_bias=rand(6, 9, dtype=F64)),
    w(dense, T, "attn_bias must be", attn_bias=torch.ones(6, 9, dtype=torch.int64)),
    w(dense, V, "alibi_slopes must have shape", alibi_slopes=rand(2)),
    w(dense, T, "alibi_slopes must be float32", alibi_slopes=rand(4, dtype=BF16)),
    w(dense, V, "(num_heads,)", learnable_sink=rand(2)),
    w(dense, T, "s_aux must be", s_aux=rand(4, dtype=F64)),
    w(dense, V, "two names of one", s_aux=rand(4), learnable_sink=rand(4)),
    w(dense, T, "block_mask must be a", block_mask=torch.ones(2, 3, dtype=torch.bool)),
    w(dense, V, "block rows", "dense(block_mask of 3 x 3 blocks of 4)", block_mask=blocks(3, 3)),
    w(dense, V, "block columns", "dense(block_mask of 2 x 2 blocks of 4)", block_mask=blocks(2, 2)),
    w(flash_attn.BlockMask.from_dense, T, "bool", blocks=rand(2, 2), block_size=4),
    w(
        flash_attn.BlockMask.from_dense,
        V,
        "block_size",
        blocks=torch.ones(2, 2, dtype=torch.bool),
        block_size=0,
    ),
    w(
        flash_attn.BlockMask.from_indices,
        V,
        "twice",
        counts=ints(2),
        indices=ints(1, 1).view(1, 2),
        block_size=4,
    ),
    w(
        flash_attn.BlockMask.from_indices,
        V,
        "columns",
        counts=ints(1),
        indices=ints(5).view(1, 1),
        block_size=4,
    ),
    w(
        flash_attn.BlockMask.from_indices,
        V,
        "counts",
        counts=ints(3),
        indices=ints(0).view(1, 1),
        block_size=4,
    ),
    # varlen
    w(packed, V, "cu_seqlens_q", cu_seqlens_q=ints(1, 3, 7)),
    w(packed, V, "cu_seqlens_k", cu_seqlens_k=ints(0, 6, 5)),
    w(packed, V, "cu_seqlens_k", cu_seqlens_k=ints(0, 5, 10)),
    w(packed, V, "cu_seqlens_q", cu_seqlens_q=ints(0, 3, 7).view(1, 3)),
    w(packed, T, "cu_seqlens_q", cu_seqlens_q=torch.tensor([0.0, 3.0, 7.0])),
    w(packed, V, "cu_seqlens", cu_seqlens_k=ints(0, 9)),
    w(packed, V, "q must have shape", q=rand(1, 7, 4, 16)),
    w(packed, V, "seqused_k", seqused_k=ints(6, 4)),
    w(packed, V, "seqused_k", seqused_k=ints(1, 2, 3)),
    w(packed, V, "attn_bias", attn_bias=rand(1, 1, 2, 5)),
    # KV cache
    w(cached, V, "cache_seqlens", cache_seqlens=ints(3, 8)),
    w(cached, V, "cache_seqlens", cache_seqlens=8),
    w(cached, V, "cache_seqlens", cache_seqlens=-1),
    w(cached, V, "cache_seqlens", k=None, v=None, cache_seqlens=ints(3, 9)),
    w(cached, V, "cache_seqlens", cache_seqlens=None),
    w(cached, V, "cache_seqlens", cache_seqlens=ints(1, 2, 3)),
    w(cached, T, "cache_seqlens", cache_seqlens=torch.tensor([1.0, 2.0])),
    w(cached, V, "v", v=None),
    w(cached, V, "rotary", rotary_cos=rand(8, 4)),
    w(cached, V, "rotary", rotary_cos=rand(8, 4), rotary_sin=rand(8, 3)),
    w(cached, V, "rotary", rotary_cos=rand(8, 9), rotary_sin=rand(8, 9)),
    w(cached, V, "rotary", rotary_cos=rand(5, 4), rotary_sin=rand(5, 4)),
    w(cached, V, "cache_batch_idx", cache_batch_idx=ints(0, 2)),
    w(cached, V, "cache_leftpad", cache_leftpad=ints(0)),
    w(pages, V, "cache_batch_idx", cache_batch_idx=ints(0, 1)),
    w(pages, V, "block_table", block_table=ints(0, 1, 4, 3).view(2, 2)),
    w(pages, V, "block_table", block_table=ints(0, 1, 2)),
    w(pages, T, "block_table", block_table=rand(2, 2)),
    w(pages, V, "cache_seqlens", cache_seqlens=ints(8, 1)),
    w(cached, V, "k_cache", k_cache=rand(2, 8, 2, 8)),
    w(
        cached,
        N,
        "no backward",
        "cached(q that requires a gradient)",
        q=rand(2, 1, 4, 16).requires_grad_(),
    ),
]


def main():
    warnings.simplefilter("ignore")
    print("| call | error | message |\n|---|---|---|")
    for row in ROWS:
        try:
            row.run()
            kind, text = "none", ""
        except Exception as error:
            kind, text = type(error).__name__, " ".join(str(error).split())
        print(f"| `{row.title}` | {kind} | {text.replace('|', '/')} |")


if __name__ == "__main__":
    main()
