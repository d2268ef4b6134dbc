# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing around attention: which forward passes run twice."""

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flash_attn import _ops
from flash_attn.integrations.torch_checkpoint import save_attention
from flash_attn.modules.mha import MHA


class Count(TorchDispatchMode):
    """How often the operator `forward` runs."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is _ops.forward
        return func(*args, **(kwargs or {}))


def gradients(block, x, **options):
    """Gradients of a checkpointed block, and how often its attention ran."""
    torch.manual_seed(3)
    with Count() as count:
        out = checkpoint(block, x, use_reentrant=False, **options) if options else block(x)
        found = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    return found, count.calls


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpoint_policy(dropout, device):
    """The same gradients three ways; with the policy attention runs once."""
    block = torch.nn.Sequential(
        torch.nn.Linear(32, 32), MHA(32, 2, causal=True, dropout=dropout), torch.nn.GELU()
    ).to(device)
    x = torch.randn(2, 10, 32, device=device, requires_grad=True)
    whole, once = gradients(block, x)
    plain, twice = gradients(block, x, preserve_rng_state=True)
    found, calls = gradients(block, x, context_fn=save_attention)
    assert (once, twice, calls) == (1, 2, 1)
    for a, b, c in zip(whole, plain, found, strict=True):
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(c, a)


def test_checkpoint_policy_compiled(device):
    """The partitioner of torch.compile follows it: no attention in the backward graph."""
    torch.compiler.reset()
    found = []

    def keep(graph, _):
        found.append(sum(node.target is _ops.forward for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    block = MHA(32, 2, causal=True).to(device)
    x = torch.randn(2, 10, 32, device=device, requires_grad=True)
    for options in ({}, {"context_fn": save_attention}):

        @torch.compile(fullgraph=True, backend=backend)
        def run(x, options=options):
            return checkpoint(block, x, use_reentrant=False, **options).sin()

        run(x).sum().backward()
    assert found == [1, 1, 1, 0]
