# SPDX-License-Identifier: BSD-3-Clause
"""DTensors: sharded calls in two processes (gloo, CPU) against whole ones in each."""

import os

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch.distributed has no gloo here", allow_module_level=True)

from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import flash_attn


def leaves(heads_k=2):
    """q, k, v and a bias, sinks and slopes in forms with and without a batch dimension."""
    torch.manual_seed(0)
    q = torch.randn(4, 5, 2 * heads_k, 8)
    k, v = (torch.randn(4, 7, heads_k, 8) for _ in "kv")
    heads = 2 * heads_k
    extras = {
        "bias": (torch.randn(1, heads, 5, 7), torch.randn(4, 1, 5, 7)),
        "slopes": (torch.rand(heads), torch.rand(4, heads)),
    }
    return (q, k, v), extras, torch.randn(heads)


def dense(q, k, v, bias, slopes, sinks):
    return flash_attn.flash_attn_func(
        q, k, v, causal=True, attn_bias=bias, alibi_slopes=slopes, learnable_sink=sinks,
        return_lse=True,
    )  # fmt: skip


def run(function, inputs):
    inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out, lse = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), wanted)


def check(mesh, function, inputs, placements, expected):
    """expected: placements of out, lse and the gradients. All values agree with a whole call's."""
    want = run(function, inputs)
    sharded = [distribute_tensor(x, mesh, [p]) for x, p in zip(inputs, placements, strict=True)]
    found = run(function, sharded)
    for a, b, placement in zip(found, want, expected, strict=True):
        assert a.placements == (placement,), (a.placements, placement)
        torch.testing.assert_close(a.full_tensor(), b)


R, B, H = Replicate(), Shard(0), Shard(2)


def check_dense(mesh):
    (q, k, v), extras, sinks = leaves()
    shared = [x[0] for x in extras.values()]
    own = [x[1] for x in extras.values()]
    rows = (q, k, v)
    summed = Partial()
    # The batch: what has no batch dimension is shared, and its gradient a sum.
    check(mesh, dense, [*rows, *shared, sinks], [B] * 3 + [R] * 3, [B] * 5 + [summed] * 3)
    check(mesh, dense, [*rows, *own, sinks], [B] * 5 + [R], [B] * 7 + [summed])
    # The heads.
    first, second = Shard(1), Shard(0)
    check(
        mesh, dense, [*rows, *shared, sinks], [H] * 3 + [first, second, second],
        [H, first, H, H, H, first, second, second],
    )  # fmt: skip
    check(
        mesh, dense, [*rows, *own, sinks], [H] * 3 + [R, first, second],
        [H, first, H, H, H, summed, first, second],
    )  # fmt: skip
    # Sequences: redistributed.
    check(mesh, dense, [*rows, *shared, sinks], [Shard(1)] * 3 + [R] * 3, [R] * 8)


def check_uneven_heads(mesh):
    """Three key heads do not split over two processes without tearing their groups."""
    (q, k, v), extras, sinks = leaves(heads_k=3)
    inputs = [q, k, v, *(x[0] for x in extras.values()), sinks]
    check(mesh, dense, inputs, [H] * 3 + [R] * 3, [R] * 8)


def check_packed(mesh):
    q = torch.randn(12, 4, 8)
    k, v = (torch.randn(12, 2, 8) for _ in "kv")
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)

    def packed(q, k, v, cu):
        return flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, return_lse=True)

    heads = Shard(1)
    check(mesh, packed, [q, k, v, cu], [heads] * 3 + [R], [heads, B, heads, heads, heads])
    check(mesh, packed, [q, k, v, cu], [B] * 3 + [R], [R] * 5)


def check_forward_alone(mesh):
    (q, k, v), _, _ = leaves()
    sharded = [distribute_tensor(x, mesh, [H]) for x in (q, k, v)]
    with torch.no_grad():
        found = flash_attn.flash_attn_func(*sharded, window_size=(2, 1))
    assert found.placements == (H,)
    torch.testing.assert_close(
        found.full_tensor(), flash_attn.flash_attn_func(q, k, v, window_size=(2, 1))
    )
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        flash_attn.flash_attn_func(*sharded, dropout_p=0.5)


def check_unregistered(mesh):
    q = distribute_tensor(torch.randn(2, 4, 2, 8), mesh, [B])
    with pytest.raises(NotImplementedError, match="integrations.torch_dtensor"):
        flash_attn.flash_attn_func(q, q, q)


def process(rank, store):
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    check_unregistered(mesh)
    import flash_attn.integrations.torch_dtensor  # noqa: F401

    for check_one in (check_dense, check_uneven_heads, check_packed, check_forward_alone):
        check_one(mesh)
    dist.barrier()
    # Not the interpreter's end: gloo's threads may outlive it, which aborts the process (seen once
    # in torch 2.15 on a busy machine).
    os._exit(0)


def test_bc69_dtensor_in_two_processes(tmp_path):
    torch.multiprocessing.spawn(process, (str(tmp_path / "store"),), 2)
