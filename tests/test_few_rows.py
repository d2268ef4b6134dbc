# SPDX-License-Identifier: BSD-3-Clause
"""Decoding: one to six query rows take loops of their own on the CPU. Around that limit, with the
dims that vectors get wrong."""

import cases
import pytest
from problem import check


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dims", [(64, 64), (16, 130), (1, 3), (40, 24), (17, 63), (200, 128)])
@pytest.mark.parametrize("seqlen_q", [1, 3, 6, 7])
def test_few_rows_dims(seqlen_q, dims, dtype, device):
    case = cases.Case(
        2, seqlen_q, 131, heads=2, heads_k=2, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype
    )
    check(case, device)


@pytest.mark.parametrize("window", [(-1, -1), (40, 0), (5, 3)])
@pytest.mark.parametrize("seqlen_k", [1, 128, 129, 700])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (6, 1)])
def test_few_rows_masks(heads, seqlen_k, window, device):
    case = cases.Case(
        1, 2, seqlen_k, heads=heads[0], heads_k=heads[1], head_dim=32, dtype="fp32", window=window
    )
    check(case, device)
