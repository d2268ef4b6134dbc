# SPDX-License-Identifier: BSD-3-Clause
"""Devices, threads, seeds and skip rules of every test. Inputs and the tolerance rule are in
problem.py.

A test with the argument `device` runs on "cpu" and on "cuda"; the second is skipped, with the
reason, where there is no GPU or the build has no attention kernels for it. With
FLASH_ATTN_TEST_POISON=1 every test finds free GPU memory full of NaN.
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


# For whole files that are about a GPU alone.
needs_cuda = pytest.mark.skipif(bool(cuda_missing()), reason=cuda_missing() or "-")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        reason = cuda_missing()
        skip = pytest.mark.skipif(bool(reason), reason=reason)
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=skip)])


def pytest_collection_modifyitems(config, items):
    """fp64 is for the CPU: on a GPU such cases are left out, not skipped one by one."""
    wrong = [item for item in items if _fp64_on_cuda(item)]
    if wrong:
        config.hook.pytest_deselected(items=wrong)
        items[:] = [item for item in items if not _fp64_on_cuda(item)]


def _fp64_on_cuda(item):
    params = item.callspec.params if hasattr(item, "callspec") else {}
    values = [getattr(value, "dtype", value) for value in params.values()]
    return params.get("device") == "cuda" and ("fp64" in values or torch.float64 in values)


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitizer: the reduced set for compute-sanitizer")
    # Else a GPU's bf16 references lose more than bf16 products and fp32 sums, and the tolerance
    # with them.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        # Else every worker starts as many compiler processes as there are cores.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def seeded(request):
    """One seed a test, from its name, so that order and selection change nothing."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    if os.environ.get("FLASH_ATTN_TEST_POISON") == "1" and not cuda_missing():
        poison_free_memory()


def poison_free_memory():
    """Fills what the caching allocator hands out next, small blocks and large, with bytes of 255:
    NaN in every floating dtype, -1 in integers."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Descending, so that each finds the holes that the larger ones left.
    sizes = {128 << 20: 3, 16 << 20: 4, 4 << 20: 8, 1100 << 10: 32, 1 << 20: 32, 512 << 10: 64}
    sizes |= {128 << 10: 64, 16 << 10: 128, 2 << 10: 256, 512: 512}
    blocks = [
        torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        for size, count in sizes.items()
        for _ in range(count)
    ]
    del blocks


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
