# SPDX-License-Identifier: BSD-3-Clause
"""What a generating caller hands to `flash_attn.modules.mha.MHA` from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class InferenceParams:
    """The state of one generation: how far it is, and the key/value caches of all layers.

    Args:
        max_seqlen: capacity of the caches, in tokens.
        max_batch_size: sequences in the caches.
        seqlen_offset: tokens that are in the caches; the caller advances it after each step.
        batch_size_offset: first cache entry of this batch.
        key_value_memory_dict: by layer_idx (max_batch_size, max_seqlen, 2, num_heads_kv, head_dim).
        lengths_per_sample: (batch,) int32, tokens of each sequence, in place of seqlen_offset.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begins another generation in the same caches."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
