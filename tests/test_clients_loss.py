# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy under FlashAttention 2's names against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, scale", [(0.0, 1.0), (0.1, 0.7)])
def test_cross_entropy(reduction, smoothing, scale):
    logits = torch.randn(9, 12, requires_grad=True)
    labels = torch.randint(12, (9,))
    labels[3] = -100
    loss = CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing, logit_scale=scale)
    found = loss(logits, labels)
    expected = F.cross_entropy(
        logits * scale, labels, reduction=reduction, label_smoothing=smoothing
    )
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad(x, logits, weights)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


def test_cross_entropy_z_loss():
    logits = torch.randn(9, 12).bfloat16()
    labels = torch.randint(12, (9,))
    labels[0] = 7777
    lse = logits.float().logsumexp(-1)
    loss, z_loss = cross_entropy_loss(logits, labels, lse_square_scale=0.1, ignore_index=7777)
    assert loss.dtype == torch.float32 and loss[0] == 0 and z_loss[0] == 0
    torch.testing.assert_close(z_loss[1:], 0.1 * lse[1:] ** 2)
    plain = F.cross_entropy(logits[1:].float(), labels[1:], reduction="none")
    torch.testing.assert_close(loss[1:], plain + z_loss[1:])
    known, _ = cross_entropy_loss(logits[1:], labels[1:], lse[1:])
    torch.testing.assert_close(known, plain)
    both = CrossEntropyLoss(lse_square_scale=0.1, ignore_index=7777, return_z_loss=True)
    mean, z_mean = both(logits, labels)
    torch.testing.assert_close(mean, loss.sum() / 8)
    torch.testing.assert_close(z_mean, z_loss.sum() / 8)


def test_cross_entropy_refuses():
    with pytest.raises(NotImplementedError, match="reduction"):
        CrossEntropyLoss(reduction="median")


def test_labels_of_another_shape_are_refused():
    logits = torch.randn(4, 11)
    with pytest.raises(ValueError, match=r"labels must have shape \(4,\), got \(1,\)"):
        CrossEntropyLoss()(logits, torch.tensor([3]))
    with pytest.raises(ValueError, match="label_smoothing must be 0 to 1, got 2"):
        CrossEntropyLoss(label_smoothing=2.0)(logits, torch.tensor([3] * 4))
