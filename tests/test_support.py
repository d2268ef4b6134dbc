# SPDX-License-Identifier: BSD-3-Clause
"""README's support matrix (support.py): every cell of this device does what it says."""

import pytest
import torch
from conftest import needs_cuda
from support import BOTH, FORWARD, NO, README, ROWS, with_table

COLUMNS = ["cpu", pytest.param("sm80", marks=needs_cuda), pytest.param("sm75", marks=needs_cuda)]


def test_support_table_is_that_of_readme():
    text = README.read_text()
    assert with_table(text) == text, "run python tests/support.py --write"


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("column", COLUMNS)
def test_support_cell(column, name, monkeypatch):
    if column == "sm75":
        monkeypatch.setenv("FLASH_ATTN_CUDA_LIMITS", "75:65536")
    row, device = ROWS[name], "cpu" if column == "cpu" else "cuda"
    dtype = row.dtype or (torch.float16 if column == "sm75" else torch.bfloat16)
    promised = getattr(row, column)
    if promised == NO:
        with pytest.raises(NotImplementedError, match="flash_attn"):
            row.run(device, dtype, None)
        return
    assert promised in (BOTH, FORWARD)
    found, expected = row.run(device, dtype, None), row.run(device, dtype, "reference")
    room = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3}.get(dtype, 3e-2)
    for a, b in zip(found, expected, strict=True):
        a, b = a.double(), b.double()
        assert torch.equal(a.isinf(), b.isinf())
        error = (a - b)[~b.isinf()].abs().max().item()
        assert error <= room * max(1.0, b[~b.isinf()].abs().max().item())
