# SPDX-License-Identifier: BSD-3-Clause
"""The support matrix of README.md, made from what the tests see.

`ROWS` says what is promised where; test_support.py calls every cell of the device that it runs on
and compares it with backend="reference", or wants the NotImplementedError. README's table is
`table()`:

    python tests/support.py --write     # after a change here
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from flash_attn import BlockMask, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- support: python tests/support.py --write -->\n", "<!-- /support -->"
COLUMNS = {"cpu": "CPU", "sm80": "CUDA 8.0 and newer", "sm75": "CUDA 7.5"}
BOTH, FORWARD, NO = "forward, backward", "forward", "-"

Results = list[torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A feature.

    Attributes:
        run: (device, dtype, backend) -> results, gradients last.
        cpu, sm80, sm75: BOTH, FORWARD or NO.
        dtype: of the call; None: the column's own, bfloat16 or, on 7.5, float16.
    """

    run: Callable[[str, torch.dtype, str | None], Results]
    cpu: str = BOTH
    sm80: str = BOTH
    sm75: str = BOTH
    dtype: torch.dtype | None = None


def randn(device, dtype, *size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype).to(device)


def leaves_of(device, dtype, lens, heads, dims, batch=2):
    sizes = (lens[0], heads[0], dims[0]), (lens[1], heads[1], dims[0]), (lens[1], heads[1], dims[1])
    made = (randn(device, dtype, batch, *size, seed=i) for i, size in enumerate(sizes))
    return [x.requires_grad_() for x in made]


def dense(more=None, lens=(37, 50), heads=(4, 4), dims=(64, 64), gradient=True):
    """flash_attn_func, with the arguments that `more` makes; tensors among them that require a
    gradient get theirs."""

    def run(device, dtype, backend):
        leaves = leaves_of(device, dtype, lens, heads, dims)
        extra = more(device, dtype) if callable(more) else dict(more or {})
        with torch.set_grad_enabled(gradient):
            out, lse = flash_attn_func(*leaves, return_lse=True, backend=backend, **extra)
        if not gradient:
            return [out, lse]
        wanted = leaves + [x for x in extra.values() if getattr(x, "requires_grad", False)]
        gradients = torch.autograd.grad(
            (out, lse), wanted, (randn(device, dtype, *out.shape, seed=9), torch.ones_like(lse))
        )
        return [out.detach(), lse.detach(), *gradients]

    return run


def packed(device, dtype, backend):
    leaves = [x.detach()[0] for x in leaves_of(device, dtype, (50, 50), (4, 2), (64, 64), 1)]
    leaves = [x.requires_grad_() for x in leaves]
    cu = torch.tensor([0, 13, 13, 45], dtype=torch.int32, device=device)
    used = torch.tensor([9, 0, 30], dtype=torch.int32, device=device)
    out = flash_attn_varlen_func(*leaves, cu, cu, causal=True, seqused_k=used, backend=backend)
    gradients = torch.autograd.grad(out, leaves, randn(device, dtype, *out.shape, seed=9))
    return [out.detach(), *gradients]


def cached(paged):
    """flash_attn_with_kvcache: appends, rotates, attends; the caches come back too."""

    def run(device, dtype, backend):
        keys, values = (randn(device, dtype, 4, 64, 2, 64, seed=i) for i in (1, 2))
        q = randn(device, dtype, 2, 3, 4, 64)
        k, v = (randn(device, dtype, 2, 3, 2, 64, seed=i) for i in (3, 4))
        angles = torch.outer(torch.arange(128.0), torch.arange(1, 17) / 10)
        table = {"cache_batch_idx": [2, 0]} if not paged else {"block_table": [[3, 1], [0, 2]]}
        table = {n: torch.tensor(x, dtype=torch.int32, device=device) for n, x in table.items()}
        out = flash_attn_with_kvcache(
            q, keys, values, k, v,
            rotary_cos=angles.cos().to(dtype).to(device),
            rotary_sin=angles.sin().to(dtype).to(device),
            cache_seqlens=torch.tensor([17, 40], dtype=torch.int32, device=device),
            causal=True, backend=backend, **table,
        )  # fmt: skip
        return [out, keys, values]

    return run


def dropped(device, dtype, backend):
    """Masks differ from the reference's, their mean does not: values of 1 come out as 1."""
    q, k, v = leaves_of(device, dtype, (512, 512), (4, 4), (64, 64))
    out = flash_attn_func(q, k, torch.ones_like(v).requires_grad_(), 0.2, backend=backend)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    return [(out.float().mean() * 50).round() / 50, dq.isfinite().all().float()]


def graded(name, *size, **others):
    def make(device, dtype):
        return {name: randn(device, dtype, *size, seed=5).requires_grad_(), **others}

    return make


def slopes(device, dtype):
    return {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], device=device).requires_grad_()}


def visible(device, dtype):
    return {"attn_bias": randn(device, torch.float32, 2, 1, 37, 50, seed=6) > -1}


def blocks(device, dtype):
    pattern = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    return {"block_mask": BlockMask.from_dense(pattern, (16, 32)).to(device)}


ROWS = {
    "bfloat16": Row(dense(), sm75=NO, dtype=torch.bfloat16),
    "float16": Row(dense(), dtype=torch.float16),
    "float32": Row(dense(), sm75=NO, dtype=torch.float32),
    "float64": Row(dense(), sm80=NO, sm75=NO, dtype=torch.float64),
    "causal, bottom-right aligned": Row(dense({"causal": True})),
    "window": Row(dense({"window_size": (20, 5)})),
    "grouped and multi-query heads": Row(dense(heads=(4, 1))),
    "head_dim 1 to 256": Row(dense(dims=(200, 200))),
    "head_dim 257 to 512": Row(dense(dims=(320, 320), gradient=False), FORWARD, FORWARD, FORWARD),
    "head_dim_v other than head_dim": Row(dense(dims=(96, 40))),
    "packed sequences, live lengths": Row(packed),
    "bias, with its gradient": Row(dense(graded("attn_bias", 1, 4, 37, 50))),
    "boolean mask": Row(dense(visible)),
    "ALiBi, with the slopes' gradient": Row(dense(slopes)),
    "softcap": Row(dense({"softcap": 5.0})),
    "sinks, with their gradient": Row(dense(graded("learnable_sink", 4))),
    "dropout": Row(dropped),
    "gradient of lse": Row(dense()),
    "deterministic": Row(dense({"deterministic": True})),
    "block masks": Row(dense(blocks)),
    "KV cache: append, rotary, batch index": Row(cached(False), FORWARD, FORWARD, FORWARD),
    "KV cache in pages": Row(cached(True), FORWARD, FORWARD, FORWARD),
}


def table():
    """The matrix as Markdown."""
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, row in ROWS.items():
        lines.append(f"| {name} | " + " | ".join(getattr(row, c) for c in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def with_table(text):
    """README's text with the matrix of now."""
    head, _, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"README.md must hold {BEGIN.strip()} and {END}")
    return head + BEGIN + table() + END + tail


if __name__ == "__main__":
    changed = with_table(README.read_text())
    if "--write" in sys.argv:
        README.write_text(changed)
    else:
        print(table(), end="")
