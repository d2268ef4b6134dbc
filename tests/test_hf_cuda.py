# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face models on a GPU: "flash_attention_2" of an unmodified transformers is this package,
and our own name beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import needs_cuda

transformers = pytest.importorskip("transformers")

from hf_fa2 import fa_utils, flash_attention_2  # noqa: E402
from hf_models import (  # noqa: E402
    CAUSAL,
    GENERATIONS,
    MODELS,
    batch,
    build,
    check_bf16,
    check_continuous_batching,
    generate,
)

import flash_attn  # noqa: E402
from flash_attn.integrations.transformers import register  # noqa: E402

pytestmark = needs_cuda

KINDS = ["none", "right", "left", "packed"]
UNPACKED = ("bert", "gpt_oss-sinks")  # eager attention of these does not see packing
CASES = [(m, kind) for m in MODELS for kind in KINDS if kind != "packed" or m not in UNPACKED]


@pytest.fixture(scope="module")
def fa2():
    with flash_attention_2() as name:
        yield name


def test_fa2_is_available_unaided():
    """Nothing is patched: a plain process on a machine with a GPU."""
    assert transformers.utils.is_flash_attn_2_available()
    net = build("llama-gqa", "flash_attention_2", torch.bfloat16, "cuda")
    assert net.config._attn_implementation == "flash_attention_2"
    assert fa_utils._flash_varlen_fn is flash_attn.flash_attn_varlen_func


@pytest.mark.parametrize("model, kind", CASES)
def test_fa2_error_in_bf16_cuda(model, kind, fa2):
    check_bf16(model, kind, fa2, "cuda")


@pytest.mark.parametrize("model, kind, cache", GENERATIONS)
def test_fa2_generation_cuda(model, kind, cache, fa2):
    """Greedy decoding in fp32 gives eager's tokens; GPT-2, which transformers cannot run in fp32
    here, gives in bf16 finite logits and as many tokens."""
    tokens, arguments = batch(kind, "cuda")
    dtype = torch.bfloat16 if model == "gpt2" else torch.float32
    made = [
        generate(build(model, way, dtype, "cuda"), tokens, arguments, cache)
        for way in ("eager", fa2)
    ]
    assert made[0].shape == made[1].shape
    assert model == "gpt2" or torch.equal(*made)


# transformers 5.17 forgets Mistral's window and Gemma's softcap here.
@pytest.mark.parametrize("model", ["llama-gqa", "gpt_oss-sinks"])
def test_fa2_continuous_batching_cuda(model, fa2):
    check_continuous_batching(build(model, fa2, torch.float32, "cuda").eval(), model)


# gpt-oss' experts in fp32 copy from the host, which no graph takes.
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_fa2_continuous_batching_graphs_cuda(asynchronous):
    """The same captured in CUDA graphs, prefill and decoding; asynchronous: the next batch is
    prepared while one runs, as transformers does by default."""
    program = Path(__file__).with_name("hf_graphs.py")
    command = [sys.executable, str(program), "llama-gqa", str(int(asynchronous))]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=paths)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.parametrize("way", ["flash_attention_2", "registered"])
def test_compile_cuda(way, fa2):
    """torch.compile of a whole model, forward and backward, without a graph break."""
    torch.compiler.reset()
    name = register() if way == "registered" else fa2
    tokens, _ = batch("none", "cuda")
    found = []
    for compiled in (False, True):
        net = build("llama-gqa", name, torch.bfloat16, "cuda")
        call = torch.compile(net, fullgraph=True) if compiled else net
        logits = call(tokens, use_cache=False).logits
        logits.float().square().mean().backward()
        found.append((logits, net.model.layers[0].self_attn.q_proj.weight.grad))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.05 * one.norm()  # fusion rounds elsewhere


def test_static_cache_graphs_cuda(fa2):
    """Greedy decoding with transformers' own compiled static cache, under our registered name."""
    torch.compiler.reset()
    name = register()
    tokens, arguments = batch("left", "cuda")
    made = []
    for way in ("eager", name):
        net = build("llama-gqa", way, torch.float32, "cuda").eval()
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
        made.append(net.generate(tokens, **arguments, **options))
    assert torch.equal(*made)


@pytest.mark.parametrize("model", CAUSAL)
def test_dropout_cuda(model, fa2):
    """Attention dropout in training: repeats under a seed, is off in evaluation, keeps the mean."""
    rate = {"attn_pdrop": 0.2} if model == "gpt2" else {"attention_dropout": 0.2}
    tokens, arguments = batch("left", "cuda")
    net = build(model, fa2, torch.bfloat16, "cuda", **rate).train()
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(net(tokens, **arguments).logits)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    net.eval()
    assert torch.equal(net(tokens, **arguments).logits, net(tokens, **arguments).logits)
