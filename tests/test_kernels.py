# SPDX-License-Identifier: BSD-3-Clause
"""Every compiled kernel row against the oracle, each CPU instruction set and each kind of GPU
forced: a new row is tested without writing a test."""

import itertools
from dataclasses import replace

import cases
import pytest
import torch
from conftest import cuda_missing
from problem import check

import flash_attn
from flash_attn import _host as host

ROWS = host.rows()
SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Plain, ragged, odd head dims, everything at once: the shapes that tiles and vectors can get wrong.
CASES = [
    cases.Case(1, 65, 129, heads=2, heads_k=1, head_dim=64, causal=True),
    cases.Case(1, 200, 100, heads=2, heads_k=1, head_dim=128, head_dim_v=72, window=(50, 20)),
    cases.Case(2, 17, 33, head_dim=13, head_dim_v=31, bias="full", sinks=True, lse_grad=True),
    cases.Case(packed=True, seqlen_q=70, seqlen_k=90, head_dim=40, dropout=0.2, slopes="batch"),
    cases.Case(1, 66, 150, head_dim=32, softcap=2.0, blocks=(16, 32), bias="mask", causal=True),
    cases.Case(3, 1, 300, heads=8, heads_k=2, head_dim=64),
    cases.Case(1, 300, 300, heads=1, heads_k=1, head_dim=256, causal=True, deterministic=True),
]


def isa_of(row):
    """What FLASH_ATTN_CPU_ISA must say for a CPU row: cpu_<isa>_<pass>_<dtype>."""
    return row["name"].split("_")[1]


def chosen(row):
    """The row that the planner takes for the row's dtype here."""
    return host.plan({"pass": row["pass"], "dtype": row["dtype"], "head_dim": 64})["kernel"]


@pytest.mark.parametrize("row", [r for r in ROWS if r["arch"] == 0], ids=lambda row: row["name"])
def test_kernels_cpu(row, monkeypatch, two_threads):
    monkeypatch.setenv("FLASH_ATTN_CPU_ISA", isa_of(row))
    if chosen(row) != row["name"]:
        pytest.skip(f"this CPU cannot run {row['name']}")
    for case in CASES:
        case = replace(case, dtype=SHORT[row["dtype"]])
        check(case, gradients=row["pass"] == "backward")


# Compute capability * 10: KiB of shared memory that a block of such a GPU may have.
GPUS = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CUDA_ROWS = [r for r in ROWS if r["arch"] > 0 and r["pass"] in ("forward", "backward")]
PLAIN = [
    cases.Case(1, 65, 129, heads=2, heads_k=1, causal=True, lse_grad=True),
    cases.Case(1, 200, 150, heads=2, heads_k=2, window=(50, 20), sinks=True),
    cases.Case(packed=True, seqlen_q=130, seqlen_k=190, causal=True),
    cases.Case(1, 150, 266, heads=2, heads_k=1, blocks=(64, 64), bits=True),
    cases.Case(3, 1, 300, heads=8, heads_k=2),
    cases.Case(1, 2, 2000, heads=4, heads_k=2, contiguous=True),
    cases.Case(1, 300, 300, heads=1, heads_k=1, deterministic=True, contiguous=True),
]
GENERAL = [
    cases.Case(1, 65, 129, heads=2, heads_k=1, causal=True, bias="full", lse_grad=True),
    cases.Case(2, 100, 150, heads=2, heads_k=2, window=(50, 20), slopes="batch", dropout=0.2),
    cases.Case(packed=True, seqlen_q=130, seqlen_k=190, softcap=2.0, bias="column", sinks=True),
    cases.Case(1, 150, 266, heads=2, heads_k=1, blocks=(64, 64), bits=True, bias="mask"),
    cases.Case(3, 1, 300, heads=8, heads_k=2, softcap=5.0),
    cases.Case(1, 2, 2000, heads=4, heads_k=2, bias="head", bias_fp32=True),
    cases.Case(1, 130, 200, heads=2, heads_k=1, bias="one", slopes="heads", deterministic=True),
    cases.Case(1, 70, 90, heads=2, heads_k=2, scale=-0.5, contiguous=True),
]


def planned(row, arch, smem, dim_loss=0):
    """The row's name that a GPU of this kind takes for problems of the row's size."""
    problem = {name: row[name] for name in ("pass", "dtype", "head_dim", "head_dim_v")}
    problem |= {name: problem[name] - dim_loss for name in ("head_dim", "head_dim_v")}
    problem |= {"device": "cuda", "arch": arch, "sm_count": 132, "smem_per_block": smem << 10}
    problem |= {"seqlen_q": 1024, "seqlen_k": 1024, "backend": row.get("family", "")}
    if row.get("name", "").count("_blocks"):
        problem |= {"block_q": 128, "block_k": 128}
    if row.get("name", "").count("_windows"):
        problem |= {"window_left": 255, "window_right": 0}
    if row.get("name", "").count("_dropout"):
        problem |= {"dropout": True}
    elif row["score"] == "general":
        problem |= {"softcap": 1.0} if problem["backend"] == "sm90" else {"bias": True}
    return host.plan(problem)["kernel"]


def gpu_of(row):
    """(arch, KiB of shared memory) of the first kind of GPU that takes the row, or None."""
    kinds = [kind for kind in GPUS.items() if planned(row, *kind) == row["name"]]
    return kinds[0] if kinds else None


@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row["name"])
def test_kernels_no_row_is_idle(row):
    """Some GPU takes every row: else it would only cost compile time."""
    assert gpu_of(row) is not None


@pytest.mark.skipif(not CUDA_ROWS, reason="this build has no CUDA attention kernels")
@pytest.mark.parametrize("arch", GPUS)
def test_kernels_every_gpu_is_served(arch):
    """Every dtype, head_dim and score of the specification, on every GPU from sm_75; the backward
    to 256. Turing's tensor cores have no bf16."""
    missing = []
    dtypes = ["float16"] + ["float32", "bfloat16"] * (arch >= 80)
    dims = [(1, 1), (64, 64), (64, 128), (128, 128), (192, 128), (256, 256)]
    for dtype, score in itertools.product(dtypes, ("plain", "general")):
        for which, pairs in (("forward", [*dims, (512, 512)]), ("backward", dims)):
            for head_dim, head_dim_v in pairs:
                row = {"pass": which, "dtype": dtype, "score": score}
                row |= {"head_dim": head_dim, "head_dim_v": head_dim_v}
                if planned(row, arch, GPUS[arch]) is None:
                    missing.append((which, dtype, score, head_dim, head_dim_v))
    assert not missing


@pytest.mark.skipif(bool(cuda_missing()), reason=cuda_missing() or "-")
@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row["name"])
def test_kernels_cuda(row, monkeypatch):
    """The row forced by taking this GPU for a smaller one; full and odd head dims."""
    arch, smem = gpu_of(row)
    major, minor = torch.cuda.get_device_capability()
    if arch > 10 * major + minor or row["arch"] > host.cuda_code():
        pytest.skip(f"this GPU, or the code built for it, cannot run {row['name']}")
    monkeypatch.setenv("FLASH_ATTN_CUDA_LIMITS", f"{arch}:{smem << 10}")
    hopper = row["family"] == "sm90"  # which leaves other cases to sm80
    for index, case in enumerate(GENERAL if row["score"] == "general" else PLAIN):
        if hopper:
            blocks = case.blocks or ("_blocks" in row["name"] and (128, 128)) or ()
            case = replace(case, aligned=True, blocks=blocks)
        loss = (8 if hopper else 3) * (index % 3 == 2)
        assert planned(row, arch, smem, loss) == row["name"]
        dims = {"head_dim": row["head_dim"] - loss, "head_dim_v": row["head_dim_v"] - loss}
        case = replace(case, dtype=SHORT[row["dtype"]], **dims)
        check(case, "cuda", backend=row["family"], gradients=row["pass"] == "backward")


def test_kernels_every_pass_and_dtype_has_a_cpu_row():
    found = {(row["pass"], row["dtype"]) for row in ROWS if row["arch"] == 0}
    assert found >= {(name, dtype) for name in ("forward", "backward") for dtype in SHORT}


def test_kernels_names_are_unique():
    names = [row["name"] for row in ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512bf16"])
def test_kernels_agree_between_instruction_sets(isa, monkeypatch):
    """fp32 results of every instruction set lie within rounding of each other."""
    q, k, v = (torch.randn(1, n, 4, 48) for n in (37, 80, 80))
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    monkeypatch.setenv("FLASH_ATTN_CPU_ISA", isa)
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, causal=True), expected)


def test_kernels_unknown_cpu_isa(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_CPU_ISA", "sse9")
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match="FLASH_ATTN_CPU_ISA must be scalar, avx2, avx512"):
        flash_attn.flash_attn_func(q, q, q)
