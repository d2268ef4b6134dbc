# SPDX-License-Identifier: BSD-3-Clause
"""torch.autograd.gradcheck in fp64, feature by feature and all together."""

from dataclasses import replace

import cases
import pytest
import torch
from problem import Problem

SMALL = cases.Case(
    1,
    4,
    5,
    heads=2,
    heads_k=1,
    head_dim=3,
    head_dim_v=2,
    dtype="fp64",
    lse_grad=True,
    contiguous=True,
)
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "empty-rows": {"seqlen_q": 6, "seqlen_k": 3, "causal": True},
    "softcap": {"softcap": 1.5},
    "slopes": {"slopes": "heads"},
    "slopes-batch": {"batch": 2, "slopes": "batch"},
    "bias-full": {"bias": "full"},
    "bias-column": {"batch": 2, "bias": "column"},
    "bias-one": {"bias": "one", "sinks": True},
    "mask": {"bias": "mask"},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.4},
    "blocks": {"blocks": (2, 2)},
    "varlen": {"packed": True},
    "scale": {"scale": -0.7},
    "everything": {
        "packed": True,
        "window": (3, 2),
        "softcap": 2.0,
        "slopes": "batch",
        "bias": "full",
        "sinks": True,
        "dropout": 0.3,
        "blocks": (2, 3),
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature):
    problem = Problem(replace(SMALL, **FEATURES[feature]))
    spare = sum(problem.lens_q), sum(problem.lens_k)
    if problem.case.packed:  # numerical differences need finite rows everywhere
        with torch.no_grad():
            for name, end in (("q", spare[0]), ("k", spare[1]), ("v", spare[1])):
                problem.leaves[name][end:] = 0
    names = [name for name, x in problem.leaves.items() if x.requires_grad]
    tensors = [problem.leaves[name] for name in names]
    # Slopes are fp32: differences of them are taken in fp64 and rounded on the way in.
    wide = [x.detach().double().requires_grad_() for x in tensors]

    def run(*inputs):
        for name, x in zip(names, inputs, strict=True):
            problem.leaves[name] = x.float() if name == "slopes" else x
        out, lse = problem.call(return_lse=True)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    eps = 1e-3 if "slopes" in names else 1e-6
    tolerance = {"eps": eps, "atol": 1e-3, "rtol": 1e-3} if "slopes" in names else {}
    assert torch.autograd.gradcheck(run, wide, **tolerance)
