# SPDX-License-Identifier: BSD-3-Clause
"""Attention, ours beside its peers, in one run.

    python benchmarks/bench.py --op fwd,bwd --impl ours,sdpa_flash,sdpa_cudnn --shapes paper \\
        --csv paper.csv --json paper.json --picture paper.png
    python benchmarks/bench.py --device cpu --op fwd,fwd_bwd --impl ours,sdpa

Each implementation is checked on the tensors that it is timed with, then timed: medians of
interleaved runs on random normal data (timing.py). Ops: fwd, bwd (over one kept graph), fwd_bwd on
--shapes; features, sparse, decode, memory and host on shapes of their own (shapes.py). Exits with
1 if ours failed or was wrong anywhere.
"""

import argparse
import datetime
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import report
import shapes
import torch
from implementations import IMPLEMENTATIONS, Unsupported, make_call
from report import Row
from shapes import Shape
from timing import measure, peak_bytes
from workload import FEATURES, Problem, check, reference

SPEED_OPS = ("fwd", "bwd", "fwd_bwd")
# What is asked of ours: ms on an H200 (the GPT-2 shapes), MiB beyond q, k and v.
MS_LIMITS = {"b64 h16 s1024 d64 causal": 2.4, "b64 h16 s1024 d64 causal p0.1": 2.9}
MEMORY_LIMIT = 920.0, 65536
SPARSE_ALLOWANCE = 0.05  # over the density, as a share of the dense time


@dataclass
class Bench:
    """What runs where; `rows` is what came of it."""

    device: torch.device
    impls: list[str]
    seconds: float
    peaks: tuple[float | None, float | None]  # TFLOP/s, GB/s
    machine: dict[str, str]
    deadline: float
    rows: list[Row]
    keep: Callable[[Shape], bool]  # which shapes

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return self.machine["device"]

    def shapes(self, found: list[Shape]) -> Iterator[Shape]:
        """Those that are kept, until the time is up."""
        for shape in filter(self.keep, found):
            if time.perf_counter() > self.deadline:
                say("the time is up")
                return
            yield shape

    def point(
        self, group: str, op: str, shape: Shape, dtype: torch.dtype, feature: str = "plain"
    ) -> dict[str, Row]:
        """Checks and times every implementation at one point."""
        problem = Problem(shape, dtype, self.device, feature)
        found: dict[str, Row] = {}
        calls = {}
        expected = reference(problem, op)
        for name in self.impls:
            row = self.row(group, op, shape, dtype, name)
            row.feature = feature
            found[name] = row
            call = self.ready(row, problem, expected)
            if call is not None:
                calls[name] = call
        for name, timing in measure(calls, self.cuda, self.seconds).items():
            row = found[name]
            row.ms, row.spread = timing.seconds * 1e3, round(timing.spread, 4)
            row.rounds, row.how = timing.rounds, timing.how
            row.tflops = shape.flops(op) / timing.seconds / 1e12
            row.gbps = shape.cache_bytes(problem.q.element_size()) / timing.seconds / 1e9
            rate, peak = (
                (row.gbps, self.peaks[1]) if op == "decode" else (row.tflops, self.peaks[0])
            )
            row.share = rate / peak if peak and dtype.itemsize == 2 else None
        self.rows += found.values()
        return found

    def row(self, group: str, op: str, shape: Shape, dtype: torch.dtype, impl: str) -> Row:
        kind = str(dtype).removeprefix("torch.")
        sizes = shape.head_dim, shape.seqlen, shape.causal
        return Row(group, op, shape.name, kind, impl, *sizes)

    def ready(self, row: Row, problem: Problem, expected: list) -> Callable | None:
        """The call of an implementation that gives the right answer, else None and a note."""
        begin = time.perf_counter()
        try:
            call = make_call(row.impl, problem, row.op)
            row.error, row.note = check(problem, call(), expected)
            if self.cuda and not row.note:
                row.peak_mib = round(peak_bytes(call) / 2**20, 1)
        except Unsupported as error:
            row.note = str(error)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            row.note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        row.setup = round(time.perf_counter() - begin, 3)
        return None if row.note else call


def bench_speed(bench: Bench, op: str, group: str, dtype: torch.dtype) -> None:
    unit = "TFLOP/s" if bench.cuda else "GFLOP/s"
    say(f"\n{op}, {str(dtype).removeprefix('torch.')}: ms, {unit}, share of the limit; * recorded")
    for shape in bench.shapes(shapes.SETS[group]()):
        found = bench.point(group, op, shape, dtype)
        line = report.speed_line(found, bench.name, unit)
        limit = MS_LIMITS.get(shape.name) if op == "fwd_bwd" and "H200" in bench.name else None
        if limit and "ours" in found and found["ours"].ms:
            line += f"  (at most {limit} ms: {'yes' if found['ours'].ms <= limit else 'NO'})"
        say(line)


def bench_features(bench: Bench, dtype: torch.dtype) -> None:
    """Speed of each feature as a share of the plain call's, forward and backward."""
    say("\nfeatures: ms (share of the plain speed), forward and backward; ! below what is asked")
    for shape in bench.shapes(shapes.features(bench.cuda)):
        plain: dict[tuple[str, str], float] = {}
        for feature, least in FEATURES.items():
            line = f"{shape.name:<26} {feature:<10}"
            for op, limit in zip(("fwd", "bwd"), least, strict=True):
                if feature == "bias_grad" and op == "fwd":
                    continue  # is bias
                for name, row in bench.point("features", op, shape, dtype, feature).items():
                    if row.ms is None:
                        continue
                    ratio = plain.setdefault((name, op), row.ms) / row.ms
                    low = name == "ours" and feature != "plain" and ratio < limit
                    line += f"  {name} {op} {row.ms:.3f} ({ratio:.2f}{'!' * low})"
            say(line)


def bench_sparse(bench: Bench, dtype: torch.dtype) -> None:
    """Times with a block mask as a share of the same implementation's dense time."""
    say("\nsparse, random 128-blocks: ms (share of the own dense time); ! above density + 0.05")
    for op in ("fwd", "bwd"):
        dense: dict[tuple[str, int], float] = {}
        for shape in bench.shapes(shapes.sparse(bench.cuda)):
            line = f"{op} {shape.name:<38}"
            found = bench.point("sparse", op, shape, dtype)
            for name, row in found.items():
                if row.ms is None:
                    continue
                if shape.density is None:
                    dense[name, shape.head_dim] = row.ms
                share = row.ms / dense.get((name, shape.head_dim), float("nan"))
                high = name == "ours" and share > (shape.density or 1) + SPARSE_ALLOWANCE
                line += f"  {name} {row.ms:.3f} ({share:.3f}{'!' * high})"
            say(line + report.stars(found, bench.name, "ms"))


def bench_decode(bench: Bench, dtype: torch.dtype) -> None:
    """A step of decoding: microseconds, and bytes of the cache a second."""
    say("\ndecode: us, GB/s of k and v, share of the limit; * recorded")
    for shape in bench.shapes(shapes.decode(bench.cuda)):
        line = f"{shape.name:<30}"
        found = bench.point("decode", "decode", shape, dtype)
        for name, row in found.items():
            if row.ms is not None:
                line += f"  {name} {row.ms * 1e3:.1f} us {row.gbps:.0f}"
                line += f" {row.share:.0%}" if row.share is not None else ""
        say(line + report.stars(found, bench.name, "us"))


def bench_memory(bench: Bench, dtype: torch.dtype) -> None:
    """Peak memory beyond q, k and v: out, dout, gradients and what a pass needs meanwhile.

    On the CPU the peak of the process so far, of ours alone.
    """
    limit, tokens = MEMORY_LIMIT
    if bench.cuda:
        say(f"\nmemory, MiB beyond q, k and v; ours at most {limit:.0f} at {tokens}; * recorded")
    else:
        say(f"\nmemory, MiB of the process at its peak; before: {process_mib():.0f}")
    for shape in bench.shapes(shapes.memory(bench.cuda)):
        for op in ("fwd", "fwd_bwd") if bench.cuda else ("fwd_bwd",):
            line, found = f"{op:<8} {shape.name:<28}", {}
            for name in bench.impls if bench.cuda else ["ours"]:
                row = bench.row("memory", op, shape, dtype, name)
                try:
                    row.peak_mib = round(peak_mib(bench, name, op, shape, dtype), 1)
                    line += f"  {name} {row.peak_mib:.0f}"
                except (Unsupported, RuntimeError, NotImplementedError) as error:
                    row.note = (str(error).splitlines() or [""])[0][:160]
                asked = (name, op, shape.seqlen) == ("ours", "fwd_bwd", tokens)
                line += "!" * bool(asked and (row.peak_mib or 0) > limit)
                found[name] = row
            bench.rows += found.values()
            say(line + report.stars(found, bench.name, "MiB"))


def process_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_mib(bench: Bench, name: str, op: str, shape: Shape, dtype: torch.dtype) -> float:
    problem = Problem(shape, dtype, bench.device)
    if not bench.cuda:
        make_call(name, problem, op)()
        return process_mib()
    call = make_call(name, problem, op)
    call()  # what is allocated once does not count
    # dout counts as the pass's own where there is a backward pass
    own = problem.dout.numel() * problem.dout.element_size() if op == "fwd_bwd" else 0
    return (peak_bytes(call) + own) / 2**20


def bench_host(bench: Bench) -> None:
    """Microseconds that the host spends on one call with tiny tensors; one thread on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shape, dtype = Shape(1, 1, 1, 8), torch.float32
    if bench.cuda:
        shape, dtype = Shape(1, 64, 1, 64), torch.bfloat16
    say(f"\nhost, us a call of {shape.name}")
    times = 500 if bench.cuda else 2000
    for grad in (False, True):
        problem = Problem(shape, dtype, bench.device)
        found: dict[str, list[float]] = {}
        loops = {}
        for name in bench.impls:
            implementation = IMPLEMENTATIONS[name]
            try:
                attend = implementation.build(problem, "fwd")
                qkv = problem.q, problem.k, problem.v
                inputs = [implementation.inputs(x).detach().requires_grad_(grad) for x in qkv]
                with implementation.context():
                    attend(*inputs)
                loops[name] = attend, inputs, implementation.context
            except (Unsupported, RuntimeError, NotImplementedError) as error:
                say(f"{name}: {(str(error).splitlines() or [''])[0][:160]}")
        for _ in range(5):
            for name, (attend, inputs, context) in loops.items():
                with context():
                    found.setdefault(name, []).append(loop_us(attend, inputs, times, bench.cuda))
        text = "  ".join(f"{name} {statistics.median(us):.2f}" for name, us in found.items())
        say(f"{'with' if grad else 'without'} gradient: {text}")
    torch.set_num_threads(threads)


def loop_us(attend: Callable, inputs: list, times: int, cuda: bool) -> float:
    """Microseconds of a call, issued one after another; results are let go at once."""
    begin = time.perf_counter()
    for _ in range(times):
        attend(*inputs)
    seconds = time.perf_counter() - begin
    if cuda:
        torch.cuda.synchronize()
    return seconds / times * 1e6


def machine_of(device: torch.device) -> dict[str, str]:
    """What a figure depends on."""
    facts = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    if device.type != "cuda":
        return {"device": f"CPU, {torch.get_num_threads()} threads", **facts}
    facts["cudnn"] = str(torch.backends.cudnn.version())
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,power.draw,clocks.sm"]
    try:
        command = [*query, "--format=csv,noheader", f"--id={torch.cuda.current_device()}"]
        facts["driver, power limit, power, clock"] = subprocess.run(
            command, capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return {"device": torch.cuda.get_device_name(device), **facts}


def say(text: str) -> None:
    print(text, flush=True)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ops = (*SPEED_OPS, *OTHERS, "host")
    parser.add_argument("--op", type=words, default=["fwd", "fwd_bwd"], help=", ".join(ops))
    parser.add_argument("--impl", type=words, help=", ".join(IMPLEMENTATIONS))
    parser.add_argument("--shapes", type=words, help=", ".join(shapes.SETS))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--dtype", type=words, help="default: the shapes' own")
    parser.add_argument("--head-dim", type=words, help="only these")
    parser.add_argument("--seqlen", type=words, help="only these")
    parser.add_argument("--mask", choices=("full", "causal"), help="only these")
    parser.add_argument("--seconds", type=float, help="of a call's rounds (GPU 0.04, CPU 0.5)")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds, then no new point")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the machine's limit")
    parser.add_argument("--csv", help="write the rows here")
    parser.add_argument("--json", help="write the rows and the machine here")
    parser.add_argument("--markdown", help="write tables of ours and its ratios here")
    parser.add_argument("--picture", help="draw TFLOP/s against seqlen here (matplotlib)")
    parser.add_argument("--load", help="read rows from this JSON file instead of running")
    options = parser.parse_args(arguments)
    cuda = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not cuda and not options.load:
        parser.error("--device cuda: torch sees no GPU")
    options.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    options.impl = options.impl or (
        ["ours", "sdpa_flash", "sdpa_cudnn"] if cuda else ["ours", "sdpa"]
    )
    options.shapes = options.shapes or ["paper" if cuda else "cpu"]
    options.seconds = options.seconds or (0.04 if cuda else 0.5)
    for given, known in (
        (options.op, ops),
        (options.impl, IMPLEMENTATIONS),
        (options.shapes, shapes.SETS),
    ):
        for word in given:
            if word not in known:
                parser.error(f"{word!r} is not one of {', '.join(known)}")
    return options


def keeper(options: argparse.Namespace) -> Callable[[Shape], bool]:
    """Whether the options leave a shape."""

    def keep(shape: Shape) -> bool:
        return (
            (not options.head_dim or str(shape.head_dim) in options.head_dim)
            and (not options.seqlen or str(shape.seqlen) in options.seqlen)
            and (not options.mask or shape.causal == (options.mask == "causal"))
        )

    return keep


OTHERS = {
    "features": bench_features,
    "sparse": bench_sparse,
    "decode": bench_decode,
    "memory": bench_memory,
}


def run(bench: Bench, options: argparse.Namespace) -> None:
    for op in options.op:
        begin = time.perf_counter()
        if op == "host":
            bench_host(bench)
        elif op in OTHERS:
            for dtype in options.dtype or ["bfloat16"]:
                OTHERS[op](bench, getattr(torch, dtype))
        else:
            for name in options.shapes:
                for dtype in options.dtype or words(shapes.DTYPES[name]):
                    bench_speed(bench, op, name, getattr(torch, dtype))
        say(f"({op}: {time.perf_counter() - begin:.1f} s)")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.simplefilter("ignore", UserWarning)  # why a backend refuses: the notes say it shorter
    if options.load:
        rows, machine = report.read_json(options.load)
    else:
        rows, machine = [], machine_of(options.device)
        say(", ".join(f"{name} {fact}" for name, fact in machine.items()))
        missing = {
            n: IMPLEMENTATIONS[n].missing(options.device.type == "cuda") for n in options.impl
        }
        for name, reason in missing.items():
            if reason:
                say(f"*** {name} does not run: {reason}")
        peaks = report.limits_of(machine["device"])
        peaks = (options.peak or peaks[0], peaks[1])
        say(f"limit {peaks[0]} TFLOP/s in 16 bit, {peaks[1]} GB/s (nominal)")
        impls = [name for name, reason in missing.items() if not reason]
        deadline = time.perf_counter() + options.time_limit
        where = options.device, impls, options.seconds, peaks, machine, deadline
        bench = Bench(*where, rows, keeper(options))
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if bench.cuda else nullcontext():
                run(bench, options)
        finally:
            finish(options, rows, machine)
    if options.load:
        finish(options, rows, machine)
    failed = [row for row in rows if row.impl == "ours" and row.note]
    return 1 if failed else 0


def finish(options: argparse.Namespace, rows: list[Row], machine: dict[str, str]) -> None:
    """Prints the summary and writes the files, of a run that broke off too."""
    speed = [row for row in rows if row.group in shapes.SETS]
    for line in ["", *report.summary(speed, machine["device"]), *report.notes(rows)]:
        say(line)
    if options.csv:
        report.write_csv(options.csv, rows)
    if options.markdown:
        Path(options.markdown).write_text(report.markdown(rows, machine["device"]))
    if options.json:
        report.write_json(options.json, rows, machine)
    if options.picture:
        say(report.picture(options.picture, rows, machine) or f"picture: {options.picture}")


if __name__ == "__main__":
    sys.exit(main())
