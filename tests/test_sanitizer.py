# SPDX-License-Identifier: BSD-3-Clause
"""Every kind of GPU kernel once, small, against the CPU's kernels: the set for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1     # else a stray access meets a neighbour's block
    for tool in memcheck racecheck synccheck initcheck; do
      compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name kns=flash_attn \
        python -m pytest -q -m sanitizer tests/test_sanitizer.py
    done

Only kernels of this package are watched (kns: a part of their names); torch's own would take
minutes. initcheck needs the inputs written by watched kernels too: leave --kernel-name out there.
Without the tool these are ordinary tests.
"""

import pytest
import torch
from conftest import needs_cuda

from flash_attn import BlockMask, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = [needs_cuda, pytest.mark.sanitizer]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def blocks(device):
    pattern = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    return {"block_mask": BlockMask.from_dense(pattern, (64, 32)).to(device)}


def scores(device, bias=(2, 4, 130, 70)):
    """softcap, bias, ALiBi, sinks, dropout; each with a gradient where it has one."""
    rng = torch.Generator().manual_seed(1)
    found = {
        "attn_bias": torch.randn(bias, generator=rng).to(BF16),
        "alibi_slopes": torch.rand(4, generator=rng),
        "learnable_sink": torch.randn(4, generator=rng).to(BF16),
    }
    found = {name: x.to(device).requires_grad_() for name, x in found.items()}
    return found | {"softcap": 3.0}


# name: dtype, (batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v), options
DENSE = {
    "bf16-64": (BF16, (1, 130, 70, 4, 2, 64, 64), {"causal": True}),
    "fp16-64": (FP16, (1, 65, 130, 2, 2, 64, 64), {"window_size": (40, 9)}),
    "fp32-64": (FP32, (1, 65, 70, 2, 1, 64, 64), {"causal": True}),
    "bf16-128": (BF16, (1, 130, 70, 2, 1, 128, 128), {}),
    "bf16-192": (BF16, (1, 66, 70, 2, 1, 192, 128), {"causal": True}),
    "bf16-256": (BF16, (1, 66, 70, 2, 1, 256, 256), {"causal": True}),
    "bf16-512": (BF16, (1, 66, 70, 2, 1, 512, 512), {}),
    "fp32-128": (FP32, (1, 66, 70, 2, 1, 128, 128), {}),
    "odd": (FP16, (1, 17, 33, 2, 1, 37, 51), {"causal": True}),
    "wide-values": (BF16, (1, 17, 33, 2, 1, 64, 128), {}),
    "splits": (BF16, (1, 2, 1500, 8, 2, 64, 64), {}),
    "deterministic": (BF16, (1, 130, 150, 4, 2, 64, 64), {"deterministic": True}),
    "blocks": (BF16, (1, 130, 90, 4, 2, 64, 64), blocks),
    "scores": (BF16, (2, 130, 70, 4, 4, 64, 64), scores),
    "scores-column": (BF16, (2, 130, 70, 4, 2, 64, 64), lambda d: scores(d, (2, 1, 1, 70))),
    "scores-128": (BF16, (2, 130, 70, 4, 2, 128, 128), lambda d: scores(d, (1, 4, 130, 70))),
    "scores-256": (BF16, (2, 130, 70, 4, 2, 256, 256), lambda d: scores(d, (1, 1, 1, 1))),
    "mask": (BF16, (1, 66, 70, 2, 1, 64, 64), lambda d: {"attn_bias": visible(66, 70).to(d)}),
    "empty-rows": (BF16, (1, 130, 3, 2, 1, 64, 64), {"causal": True}),
    "no-keys": (BF16, (1, 5, 0, 2, 1, 64, 64), {}),
    "one": (BF16, (1, 1, 1, 1, 1, 1, 1), {}),
}


def visible(seqlen_q, seqlen_k):
    return torch.rand(seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(2)) < 0.5


def make(dtype, sizes, dout_seed=3):
    batch, len_q, len_k, heads, heads_k, dim, dim_v = sizes
    rng = torch.Generator().manual_seed(dout_seed)
    shapes = [(len_q, heads, dim), (len_k, heads_k, dim), (len_k, heads_k, dim_v)]
    shapes.append((len_q, heads, dim_v))
    return [torch.randn(batch, *shape, generator=rng).to(dtype) for shape in shapes]


def close(found, expected, rounding):
    """As near as two devices that round probabilities and sums in different orders."""
    room = rounding * max(1.0, float(expected.detach().float().abs().max()))
    found, expected = found.cpu().float(), expected.float()
    assert torch.equal(found.isinf(), expected.isinf())
    infinite = expected.isinf()
    torch.testing.assert_close(found[~infinite], expected[~infinite], rtol=0, atol=room)


def both(run, rounding=2**-6):
    """run(device) on the GPU and on the CPU: the same tensors, one by one."""
    found, expected = run("cuda"), run("cpu")
    for a, b in zip(found, expected, strict=True):
        if b.numel():
            close(a, b, rounding)


@pytest.mark.parametrize("name", DENSE)
def test_sanitizer_dense(name):
    dtype, sizes, options = DENSE[name]

    def run(device):
        more = options(device) if callable(options) else options
        *leaves, dout = (x.to(device) for x in make(dtype, sizes))
        leaves = [x.requires_grad_() for x in leaves]
        leaves += [x for x in more.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        out, lse = flash_attn_func(*leaves[:3], return_lse=True, **more)
        if max(sizes[5:]) > 256:
            return out, lse
        pairs = (out, dout), (lse, torch.full_like(lse, 0.1))
        results, gradients = zip(*pairs, strict=True)
        return out, lse, *torch.autograd.grad(results, leaves, gradients)

    both(run, 1e-4 if dtype == FP32 else 2**-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_sanitizer_packed(dropout):
    """Spare rows, empty sequences, live lengths. Dropout draws by device: bounds alone there."""

    def run(device):
        q, k, v, dout = (x[0].to(device) for x in make(BF16, (1, 140, 150, 4, 2, 64, 64)))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        cu_q = torch.tensor([0, 1, 1, 70, 131], dtype=torch.int32, device=device)
        cu_k = torch.tensor([0, 65, 70, 70, 147], dtype=torch.int32, device=device)
        used = torch.tensor([60, 5, 0, 70], dtype=torch.int32, device=device)
        out, lse = flash_attn_varlen_func(
            *leaves, cu_q, cu_k, causal=True, seqused_k=used, dropout_p=dropout, return_lse=True
        )
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    if dropout:
        assert all(x.isfinite().all() for x in run("cuda")[2:])
    else:
        both(run)


@pytest.mark.parametrize("page", [0, 3, 16])
@pytest.mark.parametrize("lengths", [(17, 0, 40), (700, 1, 300)])
def test_sanitizer_decode(page, lengths):
    """Append, rotary, left padding, pages that are not there, splits."""
    batch, capacity = 3, 720
    per = -(-capacity // (page or capacity))

    def run(device):
        rng = torch.Generator().manual_seed(4)
        shape = (batch * per, page, 2, 64) if page else (batch, capacity, 2, 64)
        caches = [torch.randn(shape, generator=rng).to(device, BF16) for _ in "kv"]
        q, k, v, _ = (x.to(device) for x in make(BF16, (batch, 2, 2, 8, 2, 64, 64)))
        k, v = k[:, :, :2], v[:, :, :2]
        angle = torch.rand(capacity, 16, generator=rng) * 6
        options = {"rotary_cos": angle.cos().to(device, BF16)}
        options["rotary_sin"] = angle.sin().to(device, BF16)
        if page:
            table = torch.randperm(batch * per, generator=rng).view(batch, per).int()
            table[:, 710 // page :] = -1
            options["block_table"] = table.to(device)
        else:
            index = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
            options["cache_batch_idx"] = index
            options["cache_leftpad"] = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
        out, lse = flash_attn_with_kvcache(
            q,
            *caches,
            k,
            v,
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
            causal=True,
            return_softmax_lse=True,
            **options,
        )
        return out, lse, *caches

    both(run)


def test_sanitizer_odd_pointers():
    """Starts and rows that no vector load takes, at the very end of their memory."""

    def run(device):
        flat = [x.flatten() for x in make(FP16, (1, 66, 70, 2, 1, 64, 64))]
        shapes = [(1, 66, 2, 64), (1, 70, 1, 64), (1, 70, 1, 64), (1, 66, 2, 64)]
        tensors = []
        for x, shape in zip(flat, shapes, strict=True):
            buffer = torch.empty(x.numel() + 1, dtype=FP16, device=device)
            tensors.append(buffer[1:].copy_(x).view(shape))
        *leaves, dout = tensors
        leaves = [x.requires_grad_() for x in leaves]
        out = flash_attn_func(*leaves, causal=True)
        return out, *torch.autograd.grad(out, leaves, dout)

    both(run)
