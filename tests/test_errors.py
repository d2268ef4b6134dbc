# SPDX-License-Identifier: BSD-3-Clause
"""Every wrong call of errors_table.py gets its typed message; nothing is written before it is
raised."""

import errors_table
import pytest
import torch
from problem import raw_forward

import flash_attn
from flash_attn import _ops


@pytest.mark.parametrize("row", errors_table.ROWS, ids=lambda row: row.title[:70])
def test_errors(row):
    with pytest.raises(row.error) as caught:
        row.run()
    message = str(caught.value)
    assert type(caught.value) is row.error
    assert message.startswith("flash_attn: ") and row.text in message
    assert "\n" not in message


def test_errors_table_is_long_enough():
    assert len(errors_table.ROWS) >= 25


def test_errors_allocation():
    """An output that cannot be allocated is torch.OutOfMemoryError, and names the size."""
    # 1 PiB: beyond the address space, so that no machine grants it on credit.
    q = torch.zeros(1, 1, 1, 1).expand(1 << 20, 1 << 14, 1 << 14, 1)
    k = torch.zeros(1, 1, 1, 1).expand(1 << 20, 1, 1, 1)
    with pytest.raises(torch.OutOfMemoryError, match="flash_attn: ") as caught:
        with torch.no_grad():
            flash_attn.flash_attn_func(q, k, k)
    assert any(unit in str(caught.value) for unit in ("bytes", "GiB", "TiB"))


def test_errors_raw_operator():
    """The cheap checks of C++: the operator called directly says what is wrong."""
    q = torch.randn(2, 3, 4, 8)
    for k in (torch.randn(2, 3, 3, 8), torch.randn(2, 3, 4, 7), torch.randn(2, 3, 4, 8).bfloat16()):
        with pytest.raises(RuntimeError, match="flash_attn"):
            raw_forward(q, k, k)


def test_errors_raw_operator_is_typed_by_call():
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 3, 8)
    tail = (None,) * 17 + (1.0, 0.0, 0.0, -1, -1, 0, 0, False, 0)
    with pytest.raises(ValueError, match="^flash_attn: "):
        _ops.call(_ops.forward, q, k, k, *tail)


def test_errors_block_index_out_of_range():
    """A list made by hand that names a block that is not there."""
    mask = flash_attn.BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), 4)
    mask.indices[0, 0, 0, 0] = 9
    q = torch.randn(1, 8, 1, 8)
    with pytest.raises(ValueError, match="block"):
        flash_attn.flash_attn_func(q, q, q, block_mask=mask)


def test_errors_environment_backend(monkeypatch):
    q = torch.randn(1, 3, 1, 8)
    monkeypatch.setenv("FLASH_ATTN_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="FLASH_ATTN_BACKEND"):
        flash_attn.flash_attn_func(q, q, q)
    monkeypatch.setenv("FLASH_ATTN_BACKEND", "reference")
    flash_attn.flash_attn_func(q, q, q)


def test_errors_no_cuda_kernel_says_what_would_do():
    """explain() and an explicit backend name the reason and the alternatives."""
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(NotImplementedError) as caught:
        flash_attn.flash_attn_func(q, q, q, backend="sm90")
    assert "cpu" in str(caught.value).lower()
