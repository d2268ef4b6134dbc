# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention 2's extension by its own name; see `flash_attn._extension`."""

from flash_attn._extension import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
