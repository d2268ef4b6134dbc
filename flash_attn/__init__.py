# SPDX-License-Identifier: BSD-3-Clause
"""Exact attention in linear memory, on CPUs and GPUs, behind FlashAttention 2's functions."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
__version__ = "2.8.3"

# As in FlashAttention 2, `import flash_attn` is enough for flash_attn.flash_attn_interface.
from . import flash_attn_interface as flash_attn_interface
from .blocksparse import flash_attn_blocksparse_func
from .explain import check, explain
from .integrations import torch_sdpa
from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .masks import BlockMask

# For torch.nn.attention.activate_flash_attention_impl("flash_attn"); changes nothing by itself.
torch_sdpa.register()

__all__ = [
    "BlockMask",
    "check",
    "explain",
    "flash_attn_blocksparse_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
