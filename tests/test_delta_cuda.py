# SPDX-License-Identifier: BSD-3-Clause
"""delta = rowsum(out * dout) on a GPU: the whole way from Python to a launched kernel.

Device guard, torch's current stream, the launch check, no synchronisation, and the kernel itself
against the same sum in fp64.
"""

import pytest
import torch

import flash_attn._ops as ops

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: the CUDA kernel is NOT tested"
    ),
    pytest.mark.skipif(bool(ops.CUDA_MISSING), reason=f"no CUDA library: {ops.CUDA_MISSING}"),
]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def expected(out, dout):
    """fp64, in the layout of lse: the rows and the heads change places."""
    return (out.double() * dout.double()).sum(-1).transpose(-1, -2)


def check(out, dout):
    got = ops.delta(out, dout)
    want = expected(out, dout)
    assert got.dtype == torch.float32 and got.shape == want.shape and got.is_contiguous()
    # fp32 products and sums in another order: head_dim roundings of the sum of magnitudes
    size = (out.double() * dout.double()).abs().sum(-1).transpose(-1, -2)
    bound = size * 2.0**-24 * (out.shape[-1] / 8 + 8) + 1e-30
    assert ((got.double() - want).abs() <= bound).all()


def random(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [1, 3, 8, 40, 64, 72, 100, 128, 192, 256, 512, 1000])
def test_delta_head_dims(dtype, head_dim):
    check(*(random(2, 77, 3, head_dim, dtype=dtype) for _ in range(2)))


@dtypes
@pytest.mark.parametrize("seqlen", [1, 7, 31, 32, 33, 1000])
def test_delta_lengths(dtype, seqlen):
    check(*(random(1, seqlen, 5, 128, dtype=dtype) for _ in range(2)))


@dtypes
def test_delta_packed(dtype):
    check(*(random(301, 4, 96, dtype=dtype) for _ in range(2)))


@dtypes
def test_delta_non_contiguous(dtype):
    whole = random(2, 4, 50, 3, 128, dtype=dtype)
    head_first = whole[:, :, :, 0].transpose(1, 2)  # (batch, seqlen, heads, head_dim) by strides
    assert not head_first.is_contiguous()
    check(head_first, random(2, 50, 4, 128, dtype=dtype))
    dim_first = random(2, 50, 128, 4, dtype=dtype).transpose(2, 3)  # stride(-1) != 1: copied
    check(dim_first, head_first)
    expanded = random(1, 1, 1, 128, dtype=dtype).expand(2, 50, 4, 128)  # the gradient of sum()
    check(head_first, expanded)


@dtypes
def test_delta_misaligned(dtype):
    storage = random(2 * 33 * 4 * 64 + 1, dtype=dtype)
    out = storage[1:].view(2, 33, 4, 64)
    assert out.data_ptr() % 16 != 0
    check(out, random(2, 33, 4, 64, dtype=dtype))
    odd_rows = random(2, 33, 4, 65, dtype=dtype)[..., :64]
    check(odd_rows, odd_rows)


@pytest.mark.parametrize(
    "shape", [(0, 5, 2, 64), (2, 0, 2, 64), (2, 5, 0, 64), (0, 3, 64)], ids=str
)
def test_delta_of_nothing(shape):
    out = random(*shape, dtype=torch.bfloat16)
    assert ops.delta(out, out).numel() == 0


def test_delta_more_than_65535_heads():
    check(*(random(70_000, 1, 1, 8, dtype=torch.float16) for _ in range(2)))
    check(*(random(300, 2, 300, 8, dtype=torch.float16) for _ in range(2)))


def test_delta_offsets_beyond_32_bits():
    rows = 2**31 // 256 + 1000  # elements of the whole: more than 2^31
    if torch.cuda.mem_get_info()[0] < 3 * rows * 256 * 2:
        pytest.skip("needs 13 GB of GPU memory")
    out = torch.ones(rows, 1, 256, device="cuda", dtype=torch.bfloat16)
    out[-1] = 2
    delta = ops.delta(out, out)
    assert delta[0, 0] == 256 and delta[0, -2] == 256 and delta[0, -1] == 1024


def test_delta_runs_on_the_current_stream():
    """Held back behind a long kernel of the side stream, delta sees what is written before it."""
    out = torch.zeros(4, 64, 8, 128, device="cuda")
    dout = torch.ones_like(out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        out.fill_(1)
        delta = ops.delta(out, dout)
        event = side.record_event()
    assert not event.query(), "the call waited for the GPU"
    side.synchronize()
    assert (delta == 128).all()


def test_delta_in_a_cuda_graph():
    out, dout = (random(2, 100, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    ops.delta(out, dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        delta = ops.delta(out, dout)
    for _ in range(2):
        out.normal_()
        graph.replay()
        torch.testing.assert_close(delta.double(), expected(out, dout), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU: the device guard is NOT tested")
def test_delta_on_the_second_device():
    out = torch.randn(2, 9, 3, 64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    delta = ops.delta(out, out)
    assert delta.device == out.device and torch.cuda.current_device() == 0
    torch.testing.assert_close(delta.double(), expected(out, out), rtol=1e-5, atol=1e-5)


def test_delta_refuses():
    out = torch.zeros(2, 9, 3, 64, device="cuda")
    wrong = [
        (out, out[:, :8], ValueError, "must have shape"),
        (out, out.half(), TypeError, "must be float32"),
        (out, out.cpu(), ValueError, "must be on the device"),
        (out[0, 0], out[0, 0], ValueError, "3 or 4 dimensions"),
        (out.double(), out.double(), NotImplementedError, "float64"),
        (out.int(), out.int(), TypeError, "int32"),
    ]
    for a, b, kind, text in wrong:
        with pytest.raises(kind, match=text):
            ops.call(ops.delta, a, b)
