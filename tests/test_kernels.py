# SPDX-License-Identifier: BSD-3-Clause
"""Every compiled kernel row against the oracle, each CPU instruction set forced: a new row is
tested without writing a test."""

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


@pytest.mark.skipif(bool(cuda_missing()), reason=cuda_missing() or "-")
@pytest.mark.parametrize(
    "row",
    [r for r in ROWS if r["arch"] > 0 and r["pass"] in ("forward", "backward")],
    ids=lambda row: row["name"],
)
def test_kernels_cuda(row):
    for case in CASES:
        case = replace(case, dtype=SHORT[row["dtype"]], head_dim=row["head_dim"])
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
