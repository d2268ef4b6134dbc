# SPDX-License-Identifier: BSD-3-Clause
"""scaled_dot_product_attention after activate_flash_attention_impl("flash_attn")."""

import pytest
import torch
from conftest import needs_cuda
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash_attn
from flash_attn.integrations import torch_sdpa

attention = torch.nn.attention
if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip(f"torch {torch.__version__} has no registry", allow_module_level=True)


@pytest.fixture
def calls(monkeypatch):
    """Activates our kernels for one test; the list of operators they called."""
    seen = []

    def call(operator, *arguments):
        seen.append(operator._opname)
        return flash_attn._ops.call(operator, *arguments)

    wrapped = type("Operators", (), {**vars(flash_attn._ops), "call": staticmethod(call)})
    monkeypatch.setattr(torch_sdpa, "_ops", wrapped)
    attention.activate_flash_attention_impl("flash_attn")
    yield seen
    attention.restore_flash_attention_impl()


def inputs(device, rows=10, columns=10, heads_k=4, head_dim=16, dtype=torch.float32):
    q = torch.randn(2, 4, rows, head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(2, heads_k, columns, head_dim, device=device, dtype=dtype) for _ in "kv")
    return [x.requires_grad_() for x in (q, k, v)]


def both(leaves, **options):
    """Output and gradients; a mask that needs one is a leaf too."""
    mask = options.get("attn_mask")
    leaves = [*leaves, mask] if mask is not None and mask.requires_grad else leaves
    out = sdpa(*leaves[:3], **options)
    return out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(),
        device=out.device, dtype=out.dtype).view(out.shape))  # fmt: skip


def expected(leaves, **options):
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        return both(leaves, **options)


def test_sdpa_is_registered_and_not_active():
    assert "flash_attn" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None


KINDS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal-fewer-rows": ({"rows": 6}, {"is_causal": True}),
    "causal-fewer-keys": ({"columns": 6}, {"is_causal": True}),
    "gqa": ({"heads_k": 2}, {"enable_gqa": True, "is_causal": True}),
    "scale": ({"head_dim": 24}, {"scale": -0.3}),
    "mask": ({"columns": 13}, {"attn_mask": "bool"}),
    "bias": ({"columns": 13}, {"attn_mask": "float"}),
}


def options_of(kind, device):
    sizes, options = KINDS[kind]
    mask = options.get("attn_mask")
    if mask is not None:
        rows, columns = sizes.get("rows", 10), sizes["columns"]
        scores = torch.randn(2, 1, rows, columns, device=device)
        options = {"attn_mask": scores > -1 if mask == "bool" else scores}
    return sizes, options


@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_fp32(kind, device, calls):
    """On the CPU the flash operator, on CUDA the memory-efficient one."""
    sizes, options = options_of(kind, device)
    leaves = inputs(device, **sizes)
    found = both(leaves, **options)
    if device == "cpu" or "gqa" not in kind:  # on CUDA torch sends fp32 with GQA to math
        assert calls == ["forward", "backward"]
    for a, b in zip(found, expected(leaves, **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sdpa_restores(calls):
    leaves = inputs("cpu")
    both(leaves)
    assert attention.current_flash_attention_impl() == "flash_attn"
    attention.restore_flash_attention_impl()
    both(leaves)
    assert len(calls) == 2
    attention.activate_flash_attention_impl("flash_attn")
    both(leaves)
    assert len(calls) == 4


def test_sdpa_autocast_and_layouts(device, calls):
    """bf16 under autocast; inputs as models make them, and contiguous."""
    x = torch.randn(2, 10, 3, 4, 16, device=device).permute(2, 0, 3, 1, 4)
    with torch.autocast(device, torch.bfloat16):
        found = sdpa(*x, is_causal=True)
        assert torch.equal(sdpa(*x.contiguous(), is_causal=True), found)
    assert calls == ["forward", "forward"] and found.dtype == torch.bfloat16
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        torch.testing.assert_close(found.float(), sdpa(*x, is_causal=True), rtol=0.05, atol=0.03)


LAYOUTS = {
    "model": lambda device: torch.randn(2, 10, 3, 4, 16, device=device).permute(2, 0, 3, 1, 4),
    "contiguous": lambda device: torch.randn(3, 2, 4, 10, 16, device=device),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sdpa_strides_are_the_fake_ones(layout, device, calls):
    """Compiled code asserts the strides of what an operator returns."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run(*leaves):
        leaves = [x.requires_grad_() for x in leaves]
        out = sdpa(*leaves, is_causal=True)
        return out, *torch.autograd.grad(out.sum(), leaves)

    tensors = LAYOUTS[layout](device).bfloat16().unbind()
    real = run(*tensors)
    assert calls == ["forward", "backward"]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = run(*(mode.from_tensor(x.detach()) for x in tensors))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_sdpa_compiled(device, calls):
    """One graph, forward and backward. Inductor is for CUDA here: on a CPU it compiles C++."""
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda *x: sdpa(*x, is_causal=True).exp(), fullgraph=True, backend=backend
    )
    leaves = [x.detach().requires_grad_() for x in LAYOUTS["model"](device).bfloat16()]
    found = compiled(*leaves)
    grads = torch.autograd.grad(found.float().sum(), leaves)
    assert calls == ["forward", "backward"]
    want = sdpa(*leaves, is_causal=True).exp()
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)
    wanted = torch.autograd.grad(want.float().sum(), leaves)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


# ---- the kernels for CUDA; they run on any device, so their logic is tested on all


def test_flash_operator_with_dropout(device):
    """The backward pass draws the forward's mask: the gradient of v is linear in it."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (x.detach() for x in inputs(device, dtype=dtype))
    result = torch_sdpa._flash_forward(q, k, v, 0.4, True, scale=0.3)
    out, lse, cu_q, cu_k, rows, columns, state, unused, _ = result
    assert (cu_q, cu_k, rows, columns) == (None, None, 10, 10)
    assert state.dtype == torch.uint64 and state.shape == (2,)
    dout = torch.randn_like(out)
    lengths = cu_q, cu_k, rows, columns
    options = 0.4, True, state, unused
    grads = torch_sdpa._flash_backward(dout, q, k, v, out, lse, *lengths, *options, scale=0.3)
    torch.testing.assert_close(
        (grads[2] * v).sum().float(), (dout * out).sum().float(), rtol=1e-2, atol=1e-2
    )
    again = torch_sdpa._flash_forward(q, k, v, 0.4, True, scale=0.3)[0]
    assert not torch.equal(out, again)


def test_efficient_operator(device):
    """Rows of lse in multiples of 32; a bias with its gradient; dropout by two seeds."""
    q, k, v = inputs(device, columns=13)
    bias = torch.randn(2, 4, 10, 13, device=device, requires_grad=True)
    want = expected([q, k, v], attn_mask=bias)
    plain = [x.detach() for x in (q, k, v, bias)]
    out, lse, seed, offset = torch_sdpa._efficient_forward(*plain, True)
    assert lse.shape == (2, 4, 32)
    dout = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
    given = (*plain, out, lse, seed, offset)
    found = torch_sdpa._efficient_backward(dout, *given, 0.0, [True] * 4)
    for a, b in zip((out, *found), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch_sdpa._efficient_backward(dout, *given, 0.0, [True] * 3 + [False])[3] is None
    out, lse, seed, offset = torch_sdpa._efficient_forward(*plain, True, 0.4)
    given = (*plain, out, lse, seed, offset)
    dv = torch_sdpa._efficient_backward(dout, *given, 0.4, [True] * 4)[2]
    torch.testing.assert_close((dv * plain[2]).sum(), (dout * out).sum(), rtol=1e-3, atol=1e-3)
    assert torch_sdpa._efficient_forward(*plain, False)[1].shape == (2, 4, 0)


@pytest.mark.parametrize("window", [(None, None), (3, 0)])
def test_varlen_operator(window, device):
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(12, 4, 16, device=device, dtype=dtype).requires_grad_() for _ in "qkv")
    cu = torch.tensor([0, 5, 12], device=device)
    sides = (-1, -1) if window == (None, None) else window
    want = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, window_size=sides)
    dout = torch.randn_like(want)
    grads = torch.autograd.grad(want, (q, k, v), dout)
    options = {"window_size_left": window[0], "window_size_right": window[1]}
    plain = [x.detach() for x in (q, k, v)]
    lengths = cu, cu, 7, 7, 0.0, False
    out, lse, state, unused, _ = torch_sdpa._varlen_forward(*plain, *lengths, False, **options)
    assert lse.shape == (4, 12)
    found = torch_sdpa._varlen_backward(dout, *plain, out, lse, *lengths, state, unused, **options)
    for a, b in zip((out, *found), (want, *grads), strict=True):
        torch.testing.assert_close(a, b)


def test_sdpa_refuses():
    q, k, v = (x.detach() for x in inputs("cpu"))
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        torch_sdpa._flash_forward(q, k, v, return_debug_mask=True)
    with pytest.raises(NotImplementedError, match="block_table"):
        torch_sdpa._varlen_forward(
            q[0], k[0], v[0], None, None, 4, 4, 0.0, False, False, block_table=q
        )


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_half_on_cuda(kind, dtype, calls):
    """Every kind by torch's default choice, without a pinned backend."""
    sizes, options = options_of(kind, "cuda")
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(dtype).requires_grad_()
    leaves = inputs("cuda", **sizes, dtype=dtype)
    found = both(leaves, **options)
    assert calls == ["forward", "backward"]
    want = expected(leaves, **options)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


@needs_cuda
def test_sdpa_on_cuda_dropout_varlen_and_what_stays(calls):
    q, k, v = inputs("cuda", dtype=torch.float16)
    out = sdpa(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out.float().sum(), v)
    torch.testing.assert_close((dv * v).sum().float(), out.sum().float(), rtol=0.01, atol=0.1)
    assert calls == ["forward", "backward"]
    from torch.nn.attention.varlen import varlen_attn

    x = torch.randn(12, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    cu = torch.tensor([0, 5, 12], device="cuda", dtype=torch.int32)
    found = varlen_attn(x, x, x, cu, cu, 7, 7, window_size=(-1, 0))
    want = flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, causal=True)
    torch.testing.assert_close(found, want)
    found.sum().backward()
    del calls[:]
    wide = [torch.randn(1, 2, 8, 320, device="cuda", dtype=torch.float16) for _ in "qkv"]
    assert sdpa(*wide).isfinite().all() and not calls  # past our backward's head_dim: torch's own
