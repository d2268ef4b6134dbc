# SPDX-License-Identifier: BSD-3-Clause
"""Lets transformers take "flash_attention_2" where there is no GPU.

Its only objection to a CPU is that no CUDA device is there: the answer to that one question is
changed, everything else of transformers is as it came. So its own loading, padding, packing and
argument passing run against this package on a CPU as on a GPU.
"""

import contextlib
from unittest import mock

import pytest

transformers = pytest.importorskip("transformers")

from transformers import modeling_flash_attention_utils as fa_utils  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

_ANSWERS = (import_utils.is_torch_cuda_available, import_utils.is_flash_attn_2_available)


@contextlib.contextmanager
def flash_attention_2():
    """Within it "flash_attention_2" is this package, freshly loaded, on every device.

    gpt-oss lists the implementations that have sinks and ours is none of them by name; the list is
    taken away, so that a model with sinks comes this way too.
    """
    _forget()
    _answer_yes()
    listed = "_compatible_flash_implementations"
    with mock.patch.object(modeling_gpt_oss.GptOssPreTrainedModel, listed, None):
        yield "flash_attention_2"
    _forget()


@contextlib.contextmanager
def honest_about_the_device():
    """Within it, inside `flash_attention_2`, transformers knows again whether there is a GPU: what
    is built already stays, and nothing pins memory."""
    import_utils.is_torch_cuda_available.cache_clear()
    yield
    import_utils.is_torch_cuda_available.cache_clear()
    _answer_yes()


def _answer_yes():
    with mock.patch("torch.cuda.is_available", lambda: True):
        assert all(answer() for answer in _ANSWERS)


def _forget():
    fa_utils._loaded_implementation = None
    for answer in _ANSWERS:
        answer.cache_clear()
