# SPDX-License-Identifier: BSD-3-Clause
"""deterministic=True, and torch's global switch: the same bits each run, whatever the threads."""

import cases
import pytest
import torch
from problem import Problem

import flash_attn

CASES = [
    cases.Case(dtype="bf16", head_dim=64, seqlen_q=200, seqlen_k=300, causal=True),
    cases.Case(dtype="fp32", seqlen_q=150, seqlen_k=150, heads=6, heads_k=1, window=(40, 40)),
    cases.Case(dtype="bf16", seqlen_q=90, seqlen_k=130, bias="head", sinks=True, slopes="heads"),
    cases.Case(dtype="fp32", seqlen_q=90, seqlen_k=130, bias="one", softcap=5.0, lse_grad=True),
    cases.Case(dtype="bf16", seqlen_q=130, seqlen_k=130, packed=True, causal=True, bias="column"),
    cases.Case(dtype="fp32", seqlen_q=130, seqlen_k=130, dropout=0.3, blocks=(32, 32)),
    cases.Case(dtype="bf16", seqlen_q=64, seqlen_k=64, head_dim=256, heads=2, heads_k=1),
]


@pytest.mark.parametrize("case", CASES, ids=cases.ids)
@pytest.mark.parametrize("switch", ["argument", "global"])
def test_determinism(case, switch, two_threads, device):
    problem = Problem(case, device)
    more = {"deterministic": True} if switch == "argument" else {}
    torch.use_deterministic_algorithms(switch == "global")
    try:
        runs = []
        for _ in range(30):
            out, lse = problem.call(return_lse=True, **more)
            runs.append({"out": out, "lse": lse} | problem.gradients(out, lse, problem.leaves))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        for name, x in runs[0].items():
            assert torch.equal(run[name], x), name


def test_determinism_thread_count(device):
    """One thread and two give the same forward bits, and the same gradients when
    deterministic."""
    problem = Problem(cases.Case(seqlen_q=300, seqlen_k=300, bias="head", heads=2), device)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out, lse = problem.call(return_lse=True, deterministic=True)
        found.append({"out": out, "lse": lse} | problem.gradients(out, lse, problem.leaves))
    torch.set_num_threads(before)
    for name, x in found[0].items():
        assert torch.equal(found[1][name], x), name


def test_determinism_batch_invariance():
    """A sequence's forward result does not depend on what else is in the batch."""
    q, k, v = (torch.randn(3, n, 2, 64) for n in (70, 90, 90))
    alone = flash_attn.flash_attn_func(q[1:2], k[1:2], v[1:2], causal=True)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True)[1:2], alone)
