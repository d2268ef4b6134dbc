# SPDX-License-Identifier: BSD-3-Clause
"""Attention modules under FlashAttention 2's names."""
