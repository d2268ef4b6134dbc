# SPDX-License-Identifier: BSD-3-Clause
"""Attention on the CPU, ours beside torch's scaled_dot_product_attention, in one run.

    python benchmarks/bench.py --dtype float32,bfloat16 --op fwd,fwd_bwd --csv cpu.csv

Each point is checked for correctness once, then timed: medians of interleaved runs on random
data. Also: --op host, the cost of a call on tiny tensors with one thread, and --op memory, peak
memory of a forward and backward pass of 65,536 tokens.
"""

import argparse
import csv
import math
import resource
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from shapes import Shape, cpu_shapes
from timing import interleaved_medians

from flash_attn import flash_attn_func


def make_inputs(shape: Shape, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout, (batch, seqlen, heads, head_dim), random normal."""
    torch.manual_seed(0)
    size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    return [torch.randn(size, dtype=dtype) for _ in range(4)]


def make_calls(
    shape: Shape, dtype: torch.dtype, op: str
) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Name -> a call that gives out and, for fwd_bwd, dq, dk, dv, all (batch, seqlen, heads, dim).

    Each side gets its own contiguous layout: ours (batch, seqlen, heads, dim), torch's
    (batch, heads, seqlen, dim).
    """
    *qkv, dout = make_inputs(shape, dtype)
    flipped = [x.transpose(1, 2).contiguous() for x in qkv]
    dout_flipped = dout.transpose(1, 2).contiguous()
    grads = op == "fwd_bwd"
    for x in qkv + flipped:
        x.requires_grad_(grads)

    def ours() -> list[torch.Tensor]:
        out = flash_attn_func(*qkv, causal=shape.causal)
        return [out, *torch.autograd.grad(out, qkv, dout)] if grads else [out]

    def sdpa() -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(*flipped, is_causal=shape.causal)
        rest = torch.autograd.grad(out, flipped, dout_flipped) if grads else []
        return [x.transpose(1, 2) for x in (out, *rest)]

    return {"ours": ours, "sdpa": sdpa}


def check(calls: dict[str, Callable[[], list[torch.Tensor]]], dtype: torch.dtype) -> None:
    """Refuses to time two implementations that disagree."""
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    for a, b in zip(calls["ours"](), calls["sdpa"](), strict=True):
        error = (a.float() - b.float()).abs().max().item()
        limit = tolerance * max(1.0, b.float().abs().max().item())
        if not error <= limit:
            raise SystemExit(f"ours and sdpa differ by {error:.2e}, allowed {limit:.2e}")


def bench_speed(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    for op in args.op:
        for dtype in args.dtype:
            ratios = []
            for shape in cpu_shapes():
                calls = make_calls(shape, dtype, op)
                check(calls, dtype)
                median = interleaved_medians(calls, args.seconds)
                flops = shape.forward_flops * (3.5 if op == "fwd_bwd" else 1)
                ratio = median["sdpa"] / median["ours"]
                ratios.append(ratio)
                row = {"op": op, "dtype": str(dtype).removeprefix("torch."), "shape": shape.name}
                row |= {f"{k}_ms": round(v * 1e3, 3) for k, v in median.items()}
                row |= {f"{k}_gflops": round(flops / v / 1e9, 1) for k, v in median.items()}
                row["speedup"] = round(ratio, 3)
                rows.append(row)
                print("  ".join(f"{value:>10}" for value in row.values()), flush=True)
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{op} {dtype}: geometric mean {mean:.3f}, least {min(ratios):.3f}", flush=True)
    return rows


def repeat(call: Callable[[], object], times: int) -> None:
    """Calls, and lets go of each result before the next."""
    for _ in range(times):
        call()


def bench_host() -> None:
    """Microseconds a call of (1, 1, 1, 8) tensors costs on the host."""
    torch.set_num_threads(1)
    shape = Shape(1, 1, 1, 8, False)
    for op in ("fwd", "fwd_bwd"):
        calls = make_calls(shape, torch.float32, op)
        q, k, v, _ = make_inputs(shape, torch.float32)
        if op == "fwd_bwd":  # the forward call alone, with the tape on
            for x in (q, k, v):
                x.requires_grad_(True)
            calls = {
                "ours": lambda q=q, k=k, v=v: flash_attn_func(q, k, v),
                "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
            }
        loops = {name: partial(repeat, call, 2000) for name, call in calls.items()}
        median = interleaved_medians(loops, seconds=2)
        ours, sdpa = (median[name] / 2000 * 1e6 for name in ("ours", "sdpa"))
        grad = "with" if op == "fwd_bwd" else "without"
        print(f"host, {grad} gradient: ours {ours:.2f} us, sdpa {sdpa:.2f} us, {ours / sdpa:.2f} x")


def bench_memory() -> None:
    """Peak resident memory of forward + backward, causal, one head of 64, by length."""

    def peak_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    print(f"memory before: {peak_mib():.0f} MiB")
    for seqlen in (16384, 32768, 65536):
        shape = Shape(1, seqlen, 1, 64, True)
        make_calls(shape, torch.bfloat16, "fwd_bwd")["ours"]()
        print(f"memory after forward + backward of {seqlen} tokens: {peak_mib():.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="fwd,fwd_bwd", help="fwd, fwd_bwd, host, memory")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for a point")
    parser.add_argument("--csv", help="write the table here")
    args = parser.parse_args()
    ops = args.op.split(",")
    args.op = [op for op in ops if op in ("fwd", "fwd_bwd")]
    args.dtype = [getattr(torch, name) for name in args.dtype.split(",")]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = bench_speed(args)
    if "host" in ops:
        bench_host()
    if "memory" in ops:
        bench_memory()
    if args.csv and rows:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
