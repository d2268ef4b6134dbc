# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn.bert_padding: packing and its inverse, values, kinds and gradients."""

import pytest
import torch

from flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_bc89_unpad_gives_five_values(dtype, device):
    x = torch.randn(3, 5, 2, 4, device=device, requires_grad=True)
    rows, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(device, dtype))
    assert torch.equal(rows, x[MASK.to(device).bool()])
    assert indices.tolist() == [1, 2, 4, 10, 11, 12, 13, 14] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 3, 3, 8] and cu_seqlens.dtype == torch.int32
    assert longest == 5 and type(longest) is int
    assert used.tolist() == [3, 0, 5] and used.dtype == torch.int32
    back = pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * MASK.to(device)[:, :, None, None])
    (grad,) = torch.autograd.grad(back.square().sum() / 2, x)
    assert torch.equal(grad, back)


def test_unpad_with_unused_rows():
    x = torch.randn(3, 5, 2)
    unused = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = unpad_input(x, MASK, unused)
    assert torch.equal(rows, x[(MASK + unused).bool()])
    assert cu_seqlens.tolist() == [0, 4, 6, 11] and used.tolist() == [3, 0, 5] and longest == 5


def test_unpad_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert torch.equal(pad_input(rows, indices, 3, 6).sum(), rows.sum())


def test_unpad_nothing():
    rows, indices, cu_seqlens, longest, _ = unpad_input(torch.randn(2, 4, 3), torch.zeros(2, 4))
    assert rows.shape == (0, 3) and cu_seqlens.tolist() == [0, 0, 0] and longest == 0
    assert pad_input(rows, indices, 2, 4).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_index_functions(dtype):
    x = torch.randn(6, 2, 3, dtype=dtype, requires_grad=True)
    indices = torch.tensor([4, 0, 3])
    taken = index_first_axis(x, indices)
    assert torch.equal(taken, x[indices])
    assert torch.equal(index_put_first_axis(taken, indices, 6)[indices], taken)
    taken, whole = index_first_axis_residual(x, indices)
    (taken.sum() + 2 * whole.sum()).backward()
    assert x.grad[:, 0, 0].tolist() == [3, 2, 2, 3, 3, 2]


def test_index_functions_are_differentiable_twice():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, 1])
    assert torch.autograd.gradgradcheck(lambda x: index_first_axis(x, indices).pow(3), x)
    assert torch.autograd.gradgradcheck(lambda x: index_put_first_axis(x, indices, 4), (x[:2],))


def test_einops_names_come_from_einops():
    einops = pytest.importorskip("einops", reason="einops is not installed")
    from flash_attn.bert_padding import rearrange, repeat

    assert rearrange is einops.rearrange and repeat is einops.repeat
    with pytest.raises(ImportError):
        from flash_attn.bert_padding import no_such_name  # noqa: F401


def test_unpad_input_takes_any_mask():
    """Integers count as true or false; masks of another shape are refused."""
    rows, real, unused = (
        torch.randn(1, 4, 2),
        torch.tensor([[1, 1, 0, 0]]),
        torch.tensor([[0, 2, 1, 0]]),
    )
    packed, indices, cu_seqlens, longest, used = unpad_input(rows, real, unused)
    assert torch.equal(packed, rows[0, :3]) and indices.tolist() == [0, 1, 2]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3], 3, [2])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(1, 4\), got \(1, 3\)"):
        unpad_input(rows, real[:, :3])
