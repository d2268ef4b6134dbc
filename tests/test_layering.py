# SPDX-License-Identifier: BSD-3-Clause
"""Who may include what: reads every #include of csrc/ and compares it with the table.

The layers are what keeps a reader's walk one-way (csrc/README.md): meaning (core) knows nothing,
the planner knows meaning, kernels know both, and torch is seen in csrc/torch alone.
"""

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# folder -> beginnings of the "…" includes it may have, and of the <…> ones that are not C++'s own
ALLOWED = {
    "core": (["core/"], []),
    "plan": (["core/", "plan/"], []),
    "cpu": (["core/", "plan/kernel_list.h", "plan/plan.h", "plan/device.h", "cpu/"], ["immintrin"]),
    "cuda/ptx": (["core/types.h"], ["cuda"]),
    "cuda/tile": (["core/", "cuda/ptx/", "cuda/tile/"], ["cuda"]),
    "cuda/support": (
        [
            "core/",
            "plan/kernel_list.h",
            "cuda/ptx/",
            "cuda/tile/",
            "cuda/launch.h",
            "cuda/support/",
        ],
        ["cuda"],
    ),
    "cuda/sm80": (
        ["core/", "plan/kernel_list.h", "plan/plan.h", "cuda/ptx/", "cuda/tile/"]
        + ["cuda/launch.h", "cuda/support/", "cuda/sm80/"],
        ["cuda"],
    ),
    "cuda/sm90": (
        ["core/", "plan/kernel_list.h", "plan/plan.h", "cuda/ptx/", "cuda/tile/"]
        + ["cuda/launch.h", "cuda/support/", "cuda/sm90/"],
        ["cuda"],
    ),
    "cuda/inst": (
        ["cuda/inst/lists.h", "cuda/support/", "cuda/sm80/forward.cuh", "cuda/sm80/backward.cuh"]
        + ["cuda/sm90/forward.cuh", "cuda/sm90/backward.cuh", "plan/kernel_list.h"],
        [],
    ),
    "cuda": (["core/"], ["cuda"]),  # launch.h
    "torch": (  # of cpu/ only the functions that take plain parameters
        ["core/", "plan/", "torch/", "cpu/isa.h", "cpu/delta.h", "cpu/append.h", "cpu/rotary.h"]
        + ["cuda/support/launchers.h"],
        ["torch/", "cuda_runtime.h", "Python.h"],
    ),
    "host": (["core/", "plan/", "host/"], ["pybind11/"]),
}
STANDARD = re.compile(r"[a-z_0-9]+|arm_neon\.h|cpuid\.h")


def files():
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def folder_of(path):
    return path.parent.relative_to(CSRC).as_posix()


def wrong_includes(path):
    own, foreign = ALLOWED[folder_of(path)]
    for kind, name in re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.M):
        if kind == '"':
            fits = any(name.startswith(beginning) for beginning in own)
            fits = fits and (CSRC / name).is_file()
        else:
            fits = STANDARD.fullmatch(name) or any(name.startswith(f) for f in foreign)
        if not fits:
            yield name


def test_includes_follow_the_layers():
    unknown = {folder_of(path) for path in files()} - set(ALLOWED)
    assert not unknown, f"not in the table of layers: {unknown}"
    wrong = {path.relative_to(CSRC).as_posix(): list(wrong_includes(path)) for path in files()}
    assert not {path: names for path, names in wrong.items() if names}


def test_cuda_files_are_lists_only():
    lists = [p for p in files() if p.suffix == ".cu"]
    assert all(folder_of(p) == "cuda/inst" for p in lists), "only csrc/cuda/inst holds .cu files"
    assert len(lists) <= 16
    assert all(len(p.read_text().splitlines()) <= 40 for p in lists)


def test_no_cycle_between_headers():
    includes = {
        p.relative_to(CSRC).as_posix(): re.findall(r'#include "([^"]+)"', p.read_text())
        for p in files()
    }
    done, path = set(), []

    def visit(name):
        assert name not in path, f"headers include each other: {[*path, name]}"
        if name in done or name not in includes:
            return
        path.append(name)
        for other in includes[name]:
            visit(other)
        path.pop()
        done.add(name)

    for name in includes:
        visit(name)
