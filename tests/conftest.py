# SPDX-License-Identifier: BSD-3-Clause
"""Devices, threads, seeds and skip rules of every test. Inputs and the tolerance rule are in
problem.py.

A test with the argument `device` runs on "cpu" and on "cuda"; the second is skipped, with the
reason, where there is no GPU or the build has no attention kernels for it.
"""

import os
import zlib

import pytest
import torch

from flash_attn import _host as host


def cuda_missing():
    """Why tests cannot run on a GPU, or ''."""
    if not torch.cuda.is_available():
        return "no GPU"
    if not any(row["pass"] == "forward" and row["arch"] > 0 for row in host.rows()):
        return "this build has no CUDA attention kernels"
    return ""


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        reason = cuda_missing()
        skip = pytest.mark.skipif(bool(reason), reason=reason)
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=skip)])


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        # Else every worker starts as many compiler processes as there are cores.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def seeded(request):
    """One seed a test, from its name, so that order and selection change nothing."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
