# SPDX-License-Identifier: BSD-3-Clause
"""Functions beside attention, under the names that FlashAttention 2 gave them."""
