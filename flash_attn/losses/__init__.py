# SPDX-License-Identifier: BSD-3-Clause
"""Losses under the names that FlashAttention 2 gave them."""
