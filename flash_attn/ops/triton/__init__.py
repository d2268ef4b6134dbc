# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention 2's names for what it wrote in Triton. Nothing here needs Triton."""
