# SPDX-License-Identifier: BSD-3-Clause
"""Helpers under FlashAttention 2's names."""
