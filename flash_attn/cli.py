# SPDX-License-Identifier: BSD-3-Clause
"""The console command `flash-attn`.

flash-attn info    versions, devices, compiled kernels, what is missing and how to get it
flash-attn demo    trains a small GPT-2 on real text with and without this package (_demo.py)
flash-attn bench   runs benchmarks/bench.py of the checkout that this package lies in;
                   `bench paper` its paper.py, the first paper's tables
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch

from . import __version__, _demo, _ops
from .explain import describe_device, host_missing

_PASSES = ("forward", "backward", "delta")
_BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:  # its options are its own
        return run_bench(arguments[1:])
    options = parser().parse_args(arguments)
    return options.run(options)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="flash-attn", description=(__doc__ or "").split("\n")[0])
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="command")
    info = commands.add_parser("info", help="versions, devices, kernels, what is missing")
    info.set_defaults(run=lambda options: print(info_text()) or 0)
    demo = commands.add_parser(
        "demo",
        help="train a small GPT-2 on real text, eager attention beside ours; then generate",
    )
    demo.add_argument("--file", help="text to train on; default: Python's standard library")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU that has kernels")
    for name, text in (
        ("length", "tokens of one sequence"),
        ("batch", "sequences of one step"),
        ("layers", "of the model"),
        ("width", "of the model"),
        ("heads", "of each layer"),
        ("steps", "of training"),
        ("new-tokens", "to generate"),
        ("seed", "of the weights, the batches and the sampling"),
    ):
        demo.add_argument(f"--{name}", type=int, help=text)
    demo.set_defaults(run=run_demo)
    commands.add_parser("bench", help="time attention beside its peers; bench --help says how")
    return top


def run_bench(arguments: list[str]) -> int:
    paper = arguments[:1] == ["paper"]
    program = _BENCHMARKS / ("paper.py" if paper else "bench.py")
    if not program.exists():
        print(f"flash-attn bench: needs a checkout; there is no {program}", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, str(program), *arguments[paper:]])


def run_demo(options: argparse.Namespace) -> int:
    settings = _demo.Settings.for_device(options.device or best_device())
    for field in fields(settings):
        value = getattr(options, field.name, None)
        if value is not None:
            setattr(settings, field.name, value)
    problem = _demo.available() or impossible(settings)
    if problem:
        print(f"flash-attn demo: {problem}", file=sys.stderr)
        return 2
    return _demo.demo(settings)


def impossible(settings: _demo.Settings) -> str:
    """Why these settings cannot run, or ''."""
    if settings.device == "cuda" and best_device() != "cuda":
        return f"--device cuda: {cuda_state()[0]}"
    if settings.width % settings.heads:
        return f"--width must be a multiple of --heads, got {settings.width} and {settings.heads}"
    low = [f.name for f in fields(settings) if f.type == "int" and getattr(settings, f.name) < 1]
    if [name for name in low if name != "seed"]:
        return f"--{low[0].replace('_', '-')} must be at least 1"
    if settings.file is not None:
        try:
            size = Path(settings.file).stat().st_size
        except OSError as error:
            return f"--file {settings.file}: {error.strerror}"
        if size <= settings.length:
            return f"--file must hold more than --length {settings.length} bytes, it has {size}"
    return ""


# ---- info


def rows() -> list[dict]:
    """All compiled kernels; none where the planner is missing."""
    return [] if _ops._host is None else _ops._host.rows()


def best_device() -> str:
    """ "cuda" where there is a GPU and attention kernels for it."""
    built = any(row["arch"] > 0 and row["pass"] == "forward" for row in rows())
    return "cuda" if built and torch.cuda.is_available() else "cpu"


def cuda_state() -> tuple[str, str]:
    """(what there is for GPUs, what would help; empty when nothing is missing)."""
    if _ops._C_cuda is None:
        return (
            f"the CUDA library is not there ({_ops.CUDA_MISSING})",
            "install where nvcc is found (CUDA_HOME), with FLASH_ATTN_CUDA=1 to insist on it",
        )
    built = sum(row["arch"] > 0 and row["pass"] in ("forward", "backward") for row in rows())
    if not built:
        return (
            "the CUDA library holds no attention kernels",
            'CUDA tensors need backend="reference", or the CPU',
        )
    if not torch.cuda.is_available():
        return f"{built} attention kernels are built, but torch sees no GPU", (
            "a GPU, its driver, and a torch built for CUDA"
        )
    return f"{built} attention kernels", ""


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def info_text() -> str:
    """What `flash-attn info` prints."""
    transformers = version_of("transformers")
    cuda, cuda_help = cuda_state()
    table = {
        "flash_attn": f"{__version__}, {Path(__file__).parent}",
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}"
        + (f", CUDA {torch.version.cuda}" * bool(torch.version.cuda)),
        "transformers": transformers or "missing",
        "CPU": f"{torch.get_num_threads()} threads, {cpu_kernel()}",
        **{f"GPU {i}": gpu(i) for i in range(torch.cuda.device_count())},
        "CUDA": cuda,
    }
    lines = [f"{name:<13}{value}" for name, value in table.items()]
    lines += ["", *kernel_table()]
    missing = [("transformers", "pip install 'flash-attn[hf]'")] * (not transformers)
    missing += [("CUDA kernels", cuda_help)] * bool(cuda_help)
    missing += [("planner", host_missing())] * bool(host_missing())
    if missing:
        lines += ["", "missing:", *(f"  {name}: {text}" for name, text in missing)]
    return "\n".join(lines)


def cpu_kernel() -> str:
    """The instruction set that the kernels take here."""
    if _ops._host is None:
        return "instruction set unknown without the planner"
    names = [_ops._host.plan({"dtype": dtype})["kernel"] for dtype in ("float32", "bfloat16")]
    return ", ".join(name or "no kernel" for name in names)


def gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    text = (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )
    if _ops._host is None or _ops._C_cuda is None:
        return text
    here = describe_device(torch.device("cuda", index))
    names = [
        _ops._host.plan({"dtype": dtype, "head_dim": 64, **here})["kernel"]
        for dtype in ("float16", "bfloat16", "float32")
    ]
    return text + "; " + ", ".join(name or "no kernel" for name in names)


def kernel_table() -> list[str]:
    """Compiled kernels, counted by their family and pass."""
    found = rows()
    groups = [row["name"].partition("_" + row["pass"])[0] for row in found]
    lines = [f"{'kernels':<18}" + "".join(f"{name:>10}" for name in _PASSES) + "  dtypes"]
    for group in dict.fromkeys(groups):
        own = [row for row, of in zip(found, groups, strict=True) if of == group]
        counts = [sum(row["pass"] == name for row in own) for name in _PASSES]
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in own))
        lines.append(f"{group:<18}" + "".join(f"{n:>10}" for n in counts) + f"  {dtypes}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
