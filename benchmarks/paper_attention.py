# SPDX-License-Identifier: BSD-3-Clause
"""Attention alone, for paper.py: time, memory and traffic of the first paper's problems."""

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from implementations import Unsupported, make_call
from shapes import Shape
from timing import measure, peak_bytes
from workload import Problem, check, reference

FAILURES = (
    *(Unsupported, RuntimeError, NotImplementedError, ValueError, ImportError),
    *(OSError, subprocess.SubprocessError),
)
METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"
NCU_SECONDS = 180  # of one implementation under ncu


@dataclass(frozen=True)
class Setting:
    """What paper.py was asked for."""

    device: str
    small: bool  # sizes that take seconds
    impls: tuple[str, ...]
    steps: int  # of training
    dropout: float

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The paper's half precision; what a CPU is at home in."""
        return torch.float16 if self.cuda else torch.float32


def reason_of(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def title_problem(small: bool) -> Shape:
    """GPT-2 medium's attention: batch 64, 16 heads of 64, 1,024 tokens, causal."""
    return Shape(1, 256, 2, 64, True) if small else Shape(64, 1024, 16, 64, True)


def timed(setting: Setting, call: Callable[[], object], graphs: bool = True) -> float:
    """Milliseconds, the median of its runs."""
    seconds = 0.1 if setting.small else 0.2
    if not setting.cuda:
        return measure({"": call}, False, seconds, least=3)[""].seconds * 1e3
    with torch.cuda.stream(torch.cuda.Stream()):
        return measure({"": call}, True, seconds, least=3, graphs=graphs)[""].seconds * 1e3


def memory_of(setting: Setting, call: Callable[[], object]) -> float | None:
    """MiB beyond what was there; of a GPU only."""
    return peak_bytes(call) / 2**20 if setting.cuda else None


def attention(setting: Setting) -> Iterator[dict]:
    """Milliseconds and MiB of GPT-2 medium's attention"""
    shape = title_problem(setting.small)
    for one in (shape, replace(shape, dropout=0.1)):
        problem = Problem(one, setting.dtype, torch.device(setting.device))
        expected = reference(problem, "fwd_bwd")
        for impl in setting.impls:
            row = {"case": one.name, "impl": impl}
            try:
                for op in ("fwd", "bwd", "fwd_bwd"):
                    call = make_call(impl, problem, op)
                    results = call()
                    if op == "fwd_bwd":
                        row["MiB"] = memory_of(setting, call)
                        # A small dropped head is not near enough to its mean to be checked.
                        if not (setting.small and one.dropout):
                            row["note"] = check(problem, results, expected)[1] or None
                    del results
                    row[f"{op}_ms"] = timed(setting, call, graphs=not one.dropout)
            except FAILURES as error:
                row["note"] = reason_of(error)
            yield row


# ---- traffic


def traffic(setting: Setting) -> Iterator[dict]:
    """GB read and written in device memory by one forward and backward pass, by ncu's counters"""
    program = find_ncu()
    needs = "a GPU" if not setting.cuda else "" if program else "ncu (Nsight Compute)"
    shape = title_problem(setting.small)
    for impl in setting.impls:
        row: dict[str, object] = {"case": shape.name, "impl": impl}
        try:
            row |= {"needs": needs} if needs else counted(program, setting, impl)
        except FAILURES as error:
            row["note"] = reason_of(error)
        yield row


def find_ncu() -> str | None:
    """ncu on the path, or beside nvcc."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [shutil.which("ncu", path=os.path.join(home, "bin")) for home in homes if home]
    return shutil.which("ncu") or next((place for place in places if place), None)


def counted(program: str, setting: Setting, impl: str) -> dict[str, object]:
    """One implementation's traffic: a process of its own under ncu. Caches and clocks stay as they
    are, as without ncu."""
    command = [program, "--profile-from-start", "off", "--cache-control", "none"]
    command += ["--clock-control", "none", "--csv", "--print-units", "base"]
    command += ["--metrics", ",".join(METRICS)]
    command += [sys.executable, __file__, impl, "small" if setting.small else "whole"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_SECONDS)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        return {"needs": "the driver's permission to read the GPU's counters"}
    begin = done.stdout.find('"ID"')
    if done.returncode or begin < 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["ncu printed nothing"]
        raise RuntimeError(f"ncu: {lines[-1]}")
    return totals(done.stdout[begin:])


def totals(text: str) -> dict[str, object]:
    """Sums of ncu's CSV: kernels, GB read, GB written, both."""
    sums, kernels = dict.fromkeys(METRICS, 0.0), set()
    for line in csv.DictReader(io.StringIO(text)):
        if line.get("Metric Name") in sums:
            kernels.add(line["ID"])
            sums[line["Metric Name"]] += float(line["Metric Value"].replace(",", "")) / 1e9
    read, written = (sums[name] for name in METRICS)
    return {"kernels": len(kernels), "read": read, "written": written, "GB": read + written}


def run_once(impl: str, small: bool) -> None:
    """What ncu watches: one forward and backward pass."""
    problem = Problem(title_problem(small), torch.float16, torch.device("cuda"))
    call = make_call(impl, problem, "fwd_bwd")
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# ---- lengths


def lengths(setting: Setting, least: int) -> list[int]:
    most = 1024 if setting.small else 65536
    return [1 << n for n in range(7, 17) if least <= 1 << n <= most]


def memory(setting: Setting) -> Iterator[dict]:
    """MiB of forward and backward beyond q, k and v against length: batch 16, 8 heads of 64"""
    if not setting.cuda:
        yield {"impl": "ours", "needs": "a GPU"}
        return
    for seqlen in lengths(setting, 128):
        problem = Problem(Shape(16, seqlen, 8, 64), setting.dtype, torch.device("cuda"))
        for impl in setting.impls:
            row: dict[str, object] = {"seqlen": seqlen, "impl": impl}
            try:
                call = make_call(impl, problem, "fwd_bwd")
                call()
                row["MiB"] = memory_of(setting, call)
            except FAILURES as error:
                row["note"] = reason_of(error)
            torch.cuda.empty_cache()
            yield row


def sparse(setting: Setting) -> Iterator[dict]:
    """Milliseconds of dense and butterfly block-sparse attention against length: 8 heads of 64"""
    import flash_attn

    for seqlen in lengths(setting, 1024 if setting.cuda else 256):
        problem = Problem(Shape(1, seqlen, 8, 64), setting.dtype, torch.device(setting.device))
        mask = flash_attn.BlockMask.butterfly(seqlen, seqlen, device=setting.device)
        for impl in (*(name for name in setting.impls if name != "eager"), "ours, butterfly"):
            row: dict[str, object] = {"seqlen": seqlen, "impl": impl, "density": 1.0}
            problem.extra = {}
            name = impl
            if impl == "ours, butterfly":
                name, problem.extra = "ours", {"block_mask": mask}
                row["density"] = float(mask.density)
            try:
                for op in ("fwd", "fwd_bwd"):
                    row[f"{op}_ms"] = timed(setting, make_call(name, problem, op))
            except FAILURES as error:
                row["note"] = reason_of(error)
            yield row


if __name__ == "__main__":
    run_once(sys.argv[1], sys.argv[2] == "small")
