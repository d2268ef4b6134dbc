# SPDX-License-Identifier: BSD-3-Clause
"""What other software imports from FlashAttention 2, and the calls it makes, without that software.

One process imports every line that a client runs; several of them are unguarded there, so that a
missing name would break a program that never asked for attention.
"""

import importlib.metadata
import subprocess
import sys
import textwrap

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

IMPORTS = {
    "transformers": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import pad_input, unpad_input
    """,
    "remote-code": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
        from flash_attn.ops.triton.rotary import apply_rotary
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        import inspect
        assert "window_size" in inspect.signature(flash_attn_func).parameters
    """,
    "diffusers": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import (
            _wrapped_flash_attn_backward,
            _wrapped_flash_attn_forward,
            _wrapped_flash_attn_varlen_backward,
            _wrapped_flash_attn_varlen_forward,
        )
    """,
    "transformer-engine": """
        from flash_attn_2_cuda import varlen_bwd
        from flash_attn.flash_attn_interface import (
            _flash_attn_backward,
            _flash_attn_forward,
            _flash_attn_varlen_backward,
            _flash_attn_varlen_forward,
            flash_attn_func,
            flash_attn_varlen_func,
        )
    """,
    "megatron": """
        import flash_attn
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.layers.rotary import apply_rotary_emb
        assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 7, 3)
    """,
    "deepspeed": """
        import flash_attn
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
        assert flash_attn.__version__ >= "2.7.0"
    """,
    "ring-flash-attention": """
        from flash_attn.flash_attn_interface import (
            _flash_attn_backward,
            _flash_attn_forward,
            _flash_attn_varlen_backward,
            _flash_attn_varlen_forward,
        )
    """,
    "xformers": """
        import flash_attn
        from flash_attn.flash_attn_interface import flash_attn_gpu
        version = tuple(int(part) for part in flash_attn.__version__.split(".")[:3])
        assert (2, 7, 1) <= version <= (2, 8, 4)
        for name in ("fwd", "bwd", "varlen_fwd", "varlen_bwd", "fwd_kvcache"):
            assert callable(getattr(flash_attn_gpu, name))
    """,
    "unsloth": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import flash_attn_gpu
    """,
    "vllm": """
        from flash_attn.ops.triton.rotary import apply_rotary
    """,
    "axolotl": """
        from flash_attn.flash_attn_interface import flash_attn_func
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.bert_padding import pad_input
    """,
    "esm": """
        from flash_attn import flash_attn_varlen_qkvpacked_func
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.ops.triton.rotary import apply_rotary
    """,
}
# Modules whose presence turns clients to the calls of FlashAttention 3 and 4.
ABSENT = ("flash_attn_interface", "flash_attn_3", "flash_attn.cute", "flashattn_hopper")


def lines_of(client):
    return textwrap.dedent(IMPORTS[client])


@pytest.mark.parametrize("client", IMPORTS)
def test_import_lines(client):
    exec(compile(lines_of(client), client, "exec"), {})


def test_import_lines_in_a_process_of_their_own():
    """The extension's name first; neither Triton nor einops is there. Then in another one, the
    interface as an attribute of the package."""
    program = "import sys\nfor name in ('triton', 'einops'): sys.modules[name] = None\n"
    program += lines_of("transformer-engine") + "".join(map(lines_of, IMPORTS))
    attribute = "import flash_attn; flash_attn.flash_attn_interface.flash_attn_gpu.fwd"
    for text in (program, attribute):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_no_module_of_another_generation():
    program = f"""
import importlib.util, flash_attn
for name in {ABSENT!r}:
    assert importlib.util.find_spec(name) is None, name
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_that_every_client_accepts():
    """One string in the module and in the metadata: 2.8.3, no suffix."""
    assert flash_attn.__version__ == "2.8.3" == importlib.metadata.version("flash-attn")
    assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]


# ---- calls, as the clients write them


def packed(lengths, heads=4, heads_k=2, head_dim=16):
    total = sum(lengths)
    q = torch.randn(total, heads, head_dim)
    k, v = (torch.randn(total, heads_k, head_dim) for _ in "kv")
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return q, k, v, cu


def test_transformer_engine_calls():
    q, k, v, cu = packed([3, 6])
    out = flash_attn_varlen_func(
        q, k, v, cu, cu.clone(), 6, 6, 0.0,
        softmax_scale=0.25, causal=True, window_size=(-1, 0), alibi_slopes=None,
        deterministic=True, block_table=None,
    )  # fmt: skip
    one = flash_attn_func(q[None, :3], k[None, :3], v[None, :3], 0.0, 0.25, True)
    torch.testing.assert_close(out[:3], one[0])


def test_megatron_calls():
    """Decoding: an int length, rotary inside, caches that are permuted views; lse of both."""
    storage = [torch.randn(12, 2, 2, 16) for _ in "kv"]  # (slots, batch, heads, head_dim)
    plain = [x.transpose(0, 1).clone() for x in storage]
    q, k, v = (torch.randn(2, 1, heads, 16) for heads in (4, 2, 2))
    cos = torch.rand(12, 8)
    call = {"cache_seqlens": 5, "rotary_cos": cos, "rotary_sin": cos, "rotary_interleaved": False}
    call |= {"softmax_scale": None, "causal": True, "num_splits": 0, "return_softmax_lse": True}
    k_cache, v_cache = (x.transpose(0, 1) for x in storage)
    out, lse = flash_attn_with_kvcache(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, **call)
    call["cache_seqlens"] = torch.tensor([5, 5], dtype=torch.int32)
    again = flash_attn_with_kvcache(q, *plain, k, v, **call)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]) and lse.shape == (2, 4, 1)
    assert torch.equal(k_cache, plain[0]) and torch.equal(v_cache, plain[1])
    q, k, v, cu = packed([3, 6])
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu, cu, 6, 6,
        softmax_scale=None, causal=True, window_size=(-1, -1), block_table=None,
        return_attn_probs=True,
    )  # fmt: skip
    assert lse.shape == (4, 9)
    # Sinks applied afterwards, as Megatron does, are sinks inside.
    sinks = torch.randn(4)
    scaled = out * torch.sigmoid(lse - sinks[:, None]).T[..., None]
    inside = flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, causal=True, learnable_sink=sinks)
    torch.testing.assert_close(scaled, inside)


def test_deepspeed_calls():
    """FPDT: some by position, some by name; the backward by position with rng_state=None."""
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    q, k, v = (torch.randn(2, 5, 3, 16) for _ in "qkv")
    out, lse, _, _ = _flash_attn_forward(
        q, k, v, 0.0, 0.25,
        causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False,
    )  # fmt: skip
    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    _flash_attn_backward(
        dout, q, k, v, out, lse, *grads, 0.0, 0.25, True, -1, -1, 0.0, None, False, rng_state=None
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(flash_attn_func(*leaves, 0.0, 0.25, True), leaves, dout)
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want)


def test_unsloth_and_esm_calls():
    from flash_attn import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn.ops.triton.rotary import apply_rotary

    x = torch.randn(2, 6, 3, 4, 16)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    qkv, indices, cu, longest, _ = unpad_input(x, mask)
    cos, sin = torch.rand(6, 8), torch.rand(6, 8)
    for part in (0, 1):
        apply_rotary(qkv[:, part], cos, sin, cu_seqlens=cu, max_seqlen=longest, inplace=True)
    out = flash_attn_varlen_qkvpacked_func(qkv, cu, longest, softmax_scale=0.25)
    same = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, longest, longest, softmax_scale=0.25)
    assert torch.equal(out, same)
    out = pad_input(out, indices, 2, 6)
    turned = [apply_rotary(part, cos, sin) for part in x[:1, :3, :2].unbind(2)]
    one = flash_attn_func(*turned, x[:1, :3, 2], softmax_scale=0.25)
    torch.testing.assert_close(out[:1, :3], one)
    assert out[0, 3:].eq(0).all()


def test_video_models_calls():
    """Everything by name, maxima as tensors, cu_seqlens twice the same object."""
    q, k, v, cu = packed([4, 1])
    out = flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=torch.tensor(4),
        max_seqlen_k=torch.tensor(4),
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        deterministic=False,
    )
    torch.testing.assert_close(out[4:], v[4:].repeat_interleave(2, 1))
