# SPDX-License-Identifier: BSD-3-Clause
"""Drop-in replacements for modules of torch.nn."""

from .multihead import MultiheadAttention

__all__ = ["MultiheadAttention"]
