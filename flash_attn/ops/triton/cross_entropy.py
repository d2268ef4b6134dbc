# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy by torch, under FlashAttention 2's name and signature."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group=None,
) -> tuple[Tensor, Tensor]:
    """Loss and z-loss of each row; the z-loss is part of the loss.

    Args:
        logits: (rows, classes), any floating dtype; the arithmetic is fp32 (fp64 with fp64).
        labels: (rows,) integers.
        precomputed_lse: (rows,), log-sum-exp of the scaled logits; differentiated no further.
        label_smoothing: weight of the uniform distribution over the classes.
        logit_scale: multiplies the logits.
        lse_square_scale: weight of lse ** 2.
        ignore_index: labels whose rows give 0.
        inplace_backward: accepted; saves nothing here.
        process_group: must be None, or of one process.
    Returns:
        (rows,) float32 (float64 with float64), twice; the second carries no gradient.
    Raises:
        NotImplementedError: a vocabulary split over several processes.
    """
    if process_group is not None and torch.distributed.get_world_size(process_group) > 1:
        raise NotImplementedError(
            "flash_attn: process_group must be None or of one process: cross entropy over a split "
            "vocabulary is not implemented"
        )
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"flash_attn: labels must have shape {tuple(logits.shape[:-1])}, got "
            f"{tuple(labels.shape)}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"flash_attn: label_smoothing must be 0 to 1, got {label_smoothing}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits.to(dtype)
    if logit_scale != 1.0:
        scaled = scaled * logit_scale
    ignored = labels == ignore_index
    lse = scaled.logsumexp(-1)
    if precomputed_lse is not None:
        # The value of the one, the gradient of the other.
        lse = lse + (precomputed_lse.to(dtype) - lse).detach()
    place = labels.long().masked_fill(ignored, 0)[:, None]
    right = scaled.gather(-1, place)[:, 0]
    if label_smoothing:
        right = (1 - label_smoothing) * right + label_smoothing * scaled.mean(-1)
    z_loss = (lse_square_scale * lse.square()).masked_fill(ignored, 0)
    loss = (lse - right).masked_fill(ignored, 0) + z_loss
    return loss, z_loss.detach()
