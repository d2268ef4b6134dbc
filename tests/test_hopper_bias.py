# SPDX-License-Identifier: BSD-3-Clause
"""Bias and masks in Hopper's forward kernels, which bring them by the copy engine where they lie as
that wants it, and element by element elsewhere."""

import cases
import pytest
import torch
from conftest import cuda_missing
from problem import Problem, check

MISSING = cuda_missing() or (
    "" if torch.cuda.get_device_capability() == (9, 0) else "this GPU is not Hopper"
)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")

# By the copy engine: whole 16 bytes a row.
BOXES = [
    cases.Case(2, 200, 264, bias="full"),
    cases.Case(2, 200, 264, head_dim=128, bias="head", causal=True),
    cases.Case(2, 200, 264, head_dim=256, bias="full", window=(60, 10)),
    cases.Case(2, 130, 328, head_dim=128, bias="column"),
    cases.Case(2, 120, 264, head_dim=128, bias="full", causal=True),
    cases.Case(2, 120, 400, head_dim=128, bias="mask"),
    cases.Case(1, 200, 264, head_dim=192, head_dim_v=128, bias="full"),
    cases.Case(1, 100, 400, bias="full", dropout=0.1),
    cases.Case(2, 200, 272, bias="mask", causal=True),
    cases.Case(2, 200, 272, head_dim=256, bias="mask"),
    cases.Case(1, 300, 400, head_dim=128, bias="mask", dropout=0.2, slopes="heads"),
    cases.Case(1, 300, 400, bias="full", dropout=0.2, softcap=2.0, window=(150, -1), sinks=True),
    cases.Case(packed=True, seqlen_q=150, seqlen_k=198, bias="full", causal=True),
    cases.Case(packed=True, seqlen_q=150, seqlen_k=206, head_dim=128, bias="mask", softcap=3.0),
    cases.Case(1, 300, 640, bias="full", blocks=(128, 128), bits=True),
    cases.Case(1, 300, 640, head_dim=128, bias="mask", blocks=(64, 256)),
]
# Of several heads of a key head in one tile.
PACKED_HEADS = [
    cases.Case(2, 70, 264, heads=8, heads_k=2, bias="full"),
    cases.Case(2, 70, 264, heads=8, heads_k=2, head_dim=128, bias="head", causal=True),
    cases.Case(2, 70, 272, heads=8, heads_k=2, head_dim=128, bias="mask"),
    cases.Case(2, 70, 264, heads=8, heads_k=2, bias="column"),
    cases.Case(2, 70, 264, heads=6, heads_k=2, bias="full"),
]
BY_ELEMENT = [
    cases.Case(2, 200, 264, bias="full", bias_fp32=True),
    cases.Case(2, 200, 263, bias="full", causal=True),
    cases.Case(2, 200, 263, head_dim=128, bias="mask"),
    cases.Case(2, 200, 263, head_dim=256, bias="row", softcap=1.0),
    cases.Case(2, 200, 263, head_dim=128, bias="one", dropout=0.1),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", BOXES + PACKED_HEADS + BY_ELEMENT, ids=lambda case: case.id)
def test_hopper_bias(case, dtype):
    case = cases.replace(case, dtype=dtype, contiguous=True)
    check(case, "cuda", backend="sm90", gradients=False)


@pytest.mark.parametrize("case", [BOXES[0], BOXES[4]], ids=["full", "mask"])
def test_hopper_bias_strides(case):
    """As a part of something larger, with rows, heads and batches in another order."""
    case = cases.replace(case, dtype="bf16", contiguous=True)
    problem = Problem(case, "cuda")
    bias = problem.leaves["bias"].detach()
    b, h, q, k = bias.shape
    room = torch.full((q, b, h, k + 40), float("nan"), device="cuda").to(bias.dtype)
    view = room[..., 16 : k + 16].permute(1, 2, 0, 3)
    problem.leaves["bias"] = view.copy_(bias)
    check(case, "cuda", backend="sm90", gradients=False, problem=problem)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_bias_hides(head_dim):
    """-inf hides like a mask, whole rows and whole tiles too."""
    case = cases.Case(2, 200, 264, head_dim=head_dim, bias="full", dtype="bf16", contiguous=True)
    problem = Problem(case, "cuda")
    bias = problem.leaves["bias"].detach()
    bias[torch.rand(bias.shape, device="cuda") < 0.3] = -torch.inf
    bias[:, :, 5::7] = -torch.inf
    bias[:, :, :, 128:] = -torch.inf
    problem.leaves["bias"] = bias
    check(case, "cuda", backend="sm90", gradients=False, problem=problem)
