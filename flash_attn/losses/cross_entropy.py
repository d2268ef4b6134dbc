# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy with label smoothing, a logit scale and the z-loss, under FlashAttention 2's names.

By torch, in fp32 (fp64 with fp64) whatever the logits are: nothing of attention, but clients import
it from here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.triton.cross_entropy import cross_entropy_loss


class CrossEntropyLoss(torch.nn.Module):
    """Cross entropy of logits (rows, classes) and labels (rows,).

    Args:
        ignore_index: labels that count for nothing.
        reduction: "mean" over the labels that count, "sum" or "none".
        label_smoothing: 0 to 1.
        logit_scale: multiplies the logits.
        lse_square_scale: weight of the z-loss, lse ** 2, which is part of the loss.
        inplace_backward: accepted; saves nothing here.
        process_group: must be None, or of one process: no vocabulary is split here.
        return_z_loss: return (loss, z_loss).
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group=None,
        return_z_loss: bool = False,
    ):
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(
                f"flash_attn: reduction must be 'mean', 'none' or 'sum', got {reduction!r}"
            )
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.logit_scale = label_smoothing, logit_scale
        self.lse_square_scale, self.inplace_backward = lse_square_scale, inplace_backward
        self.process_group, self.return_z_loss = process_group, return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss, float32 (float64 with float64), a scalar or (rows,)."""
        loss, z_loss = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        if self.reduction != "none":
            loss, z_loss = loss.sum(), z_loss.sum()
        if self.reduction == "mean":
            counted = (target != self.ignore_index).sum()
            loss, z_loss = loss / counted, z_loss / counted
        return (loss, z_loss) if self.return_z_loss else loss
