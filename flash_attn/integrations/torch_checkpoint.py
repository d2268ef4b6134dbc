# SPDX-License-Identifier: BSD-3-Clause
"""A policy for torch.utils.checkpoint: recompute everything but attention.

    checkpoint(block, x, use_reentrant=False, context_fn=save_attention)

A checkpointed block costs one more forward pass; attention is the part of it whose cost grows with
the square of the length, while what it returns grows with the length alone. Works in eager mode and
under torch.compile. With dropout the recomputed seed is the first one's, as for any random operator
(preserve_rng_state, the default).
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .. import _ops

# Also for policies of one's own: the operators whose results are worth keeping.
SAVED = (_ops.forward,)


def policy(context, operator, *arguments, **options) -> CheckpointPolicy:
    """Keep what attention returns, (out, lse); recompute the rest."""
    kept = operator in SAVED
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def save_attention():
    """What torch.utils.checkpoint.checkpoint takes as its `context_fn`."""
    return create_selective_checkpoint_contexts(policy)
