# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that are compared, each in its own layout, and the calls that are timed."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from shapes import BLOCK
from torch import Tensor
from workload import Problem

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is built in place

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unsupported(Exception):
    """An implementation that does not do what the problem asks."""


@dataclass(frozen=True)
class Implementation:
    """How to call one of them.

    Attributes:
        build: (problem, op) -> function of q, k, v.
        missing: why it cannot run here (argument: whether on a GPU), or ''.
        heads_first: q, k, v are (batch, heads, seqlen, head_dim).
        dense: and contiguous so; else views of (batch, seqlen, heads, head_dim), which torch's
            flash backward would otherwise copy out and dout into.
        context: what its forward call runs in.
    """

    build: Callable[[Problem, str], Attend]
    missing: Callable[[bool], str]
    heads_first: bool = False
    dense: bool = True
    context: Callable[[], AbstractContextManager] = nullcontext

    def inputs(self, x: Tensor) -> Tensor:
        """(batch, seqlen, heads, head_dim) in this one's layout."""
        if not self.heads_first:
            return x
        return x.transpose(1, 2).contiguous() if self.dense else x.transpose(1, 2)


def refuse_if(condition: object, what: str) -> None:
    if condition:
        raise Unsupported(what)


# ---- ours


def build_ours(problem: Problem, op: str) -> Attend:
    import flash_attn

    shape = problem.shape
    if op == "decode":
        lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=problem.device)
        return partial(_with_cache, flash_attn.flash_attn_with_kvcache, lengths)
    options = dict(problem.extra, causal=shape.causal, dropout_p=problem.dropout)
    if problem.blocks is not None:
        options["block_mask"] = flash_attn.BlockMask.from_dense(problem.blocks, BLOCK)
    return partial(flash_attn.flash_attn_func, **options)


def _with_cache(function: Callable, lengths: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return function(q, k, v, cache_seqlens=lengths)


def ours_missing(cuda: bool) -> str:
    try:
        from flash_attn import _host
    except ImportError as error:
        return f"flash_attn does not import: {error}"
    if cuda and not any(row["arch"] > 0 and row["pass"] == "forward" for row in _host.rows()):
        return "this build has no CUDA attention kernels"
    return ""


# ---- torch


def build_sdpa(problem: Problem, op: str) -> Attend:
    refuse_if(problem.blocks is not None, "no block masks")
    bias = problem.extra.get("attn_bias")
    refuse_if(bias is None and problem.extra, f"no {problem.feature}")
    shape = problem.shape
    options = {"is_causal": shape.causal, "dropout_p": problem.dropout, "attn_mask": bias}
    if shape.heads_k:
        options["enable_gqa"] = True
    return partial(F.scaled_dot_product_attention, **options)


def fused_sdpa(backend: str, missing: Callable[[bool], str]) -> Implementation:
    """One of SDPA's backends, and no other."""

    def context() -> AbstractContextManager:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, backend))

    return Implementation(build_sdpa, missing, True, False, context)


def gpu_only(cuda: bool) -> str:
    return "" if cuda else "GPU only"


def build_eager(problem: Problem, op: str) -> Attend:
    """As models wrote it before: the scores in memory, in the inputs' dtype."""
    shape, extra = problem.shape, problem.extra
    refuse_if(problem.blocks is not None or set(extra) - {"attn_bias"}, f"no {problem.feature}")
    hidden = None
    if shape.causal:
        hidden = torch.ones(shape.seqlen, shape.keys, dtype=torch.bool, device=problem.device)
        hidden = hidden.triu(1 + shape.keys - shape.seqlen)
    group = shape.heads // shape.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) * shape.head_dim**-0.5
        bias = extra.get("attn_bias")
        if bias is not None:
            boolean = bias.dtype == torch.bool
            scores = scores.masked_fill(~bias, -torch.inf) if boolean else scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return F.dropout(scores.softmax(-1), problem.dropout) @ v

    return attend


@cache
def compiled_flex() -> Callable:
    from torch._dynamo import config
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import flex_attention

    config.recompile_limit = 512
    functorch_config.donated_buffer = False  # the graph is kept between timed backward passes
    return torch.compile(flex_attention, dynamic=False)


def build_flex(problem: Problem, op: str) -> Attend:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    shape, extra = problem.shape, problem.extra
    refuse_if(problem.dropout, "no dropout")
    refuse_if(set(extra) - {"softcap", "alibi_slopes"}, f"{problem.feature} is not set up here")
    refuse_if(op != "fwd" and problem.device.type == "cpu", "no backward on the CPU")
    options: dict[str, object] = {"enable_gqa": bool(shape.heads_k)}
    if shape.causal:
        options["block_mask"] = create_block_mask(
            lambda b, h, i, j: i + shape.keys - shape.seqlen >= j,
            *(None, None, shape.seqlen, shape.keys),
            device=problem.device,
        )
    elif problem.blocks is not None:
        counts = problem.blocks.sum(1, dtype=torch.int32)[None, None]
        order = problem.blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None]
        nothing = torch.zeros_like(counts), torch.zeros_like(order)
        options["block_mask"] = BlockMask.from_kv_blocks(*nothing, counts, order, BLOCK)
    if "softcap" in extra:
        cap = extra["softcap"]
        options["score_mod"] = lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    if "alibi_slopes" in extra:
        slopes = extra["alibi_slopes"]
        options["score_mod"] = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
    return partial(compiled_flex(), **options)


# ---- other packages


def fa3_module():
    """A full build's flash_attn_interface, or the prebuilt forward fa3_fwd_interface."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    return None


def fa3_missing(cuda: bool) -> str:
    return gpu_only(cuda) or ("" if fa3_module() else "not installed (pip install fa3-fwd)")


def build_fa3(problem: Problem, op: str) -> Attend:
    module, shape = fa3_module(), problem.shape
    refuse_if(problem.extra or problem.dropout, f"no {problem.feature}")
    refuse_if(problem.blocks is not None, "no block masks")
    forward_only = module.__name__ == "fa3_fwd_interface"
    refuse_if(forward_only and op not in ("fwd", "decode"), "this build has no backward")
    if op == "decode" and hasattr(module, "flash_attn_with_kvcache"):
        lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=problem.device)
        return partial(_with_cache, module.flash_attn_with_kvcache, lengths)
    return partial(_first, module.flash_attn_func, causal=shape.causal)


def _first(function: Callable, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    result = function(q, k, v, **options)
    return result[0] if isinstance(result, tuple) else result


@cache
def fa4_function() -> Callable | None:
    """flash_attn.cute's flash_attn_func; it may lie beside our package of the same name."""
    try:
        import flash_attn

        for folder in sys.path:
            beside = Path(folder) / "flash_attn"
            if (beside / "cute").is_dir() and str(beside) not in flash_attn.__path__:
                flash_attn.__path__.append(str(beside))
    except ImportError:
        return None
    if importlib.util.find_spec("flash_attn.cute") is None:
        return None
    return importlib.import_module("flash_attn.cute.interface").flash_attn_func


def fa4_missing(cuda: bool) -> str:
    return gpu_only(cuda) or ("" if fa4_function() else "not installed (pip install flash-attn-4)")


def build_fa4(problem: Problem, op: str) -> Attend:
    extra = dict(problem.extra)
    refuse_if(set(extra) - {"softcap", "learnable_sink"}, f"no {problem.feature}")
    refuse_if(problem.dropout, "no dropout")
    refuse_if(problem.blocks is not None, "block masks are not set up here")
    return partial(_first, fa4_function(), causal=problem.shape.causal, **extra)


IMPLEMENTATIONS = {
    "ours": Implementation(build_ours, ours_missing),
    "sdpa": Implementation(build_sdpa, lambda cuda: "", True),
    "sdpa_flash": fused_sdpa("FLASH_ATTENTION", lambda cuda: ""),
    "sdpa_cudnn": fused_sdpa("CUDNN_ATTENTION", gpu_only),
    "sdpa_efficient": fused_sdpa("EFFICIENT_ATTENTION", gpu_only),
    "flex": Implementation(build_flex, lambda cuda: "", True),
    "fa3": Implementation(build_fa3, fa3_missing),
    "fa4": Implementation(build_fa4, fa4_missing),
    "eager": Implementation(build_eager, lambda cuda: "", True),
}


def make_call(name: str, problem: Problem, op: str) -> Callable[[], list[Tensor]]:
    """The call that is timed: it gives out (fwd, decode), dq dk dv (bwd) or all four (fwd_bwd).

    The backward pass alone runs again and again over one kept graph. Results are
    (batch, seqlen, heads, head_dim), as views.
    """
    implementation = IMPLEMENTATIONS[name]
    flip = implementation.inputs
    attend = implementation.build(problem, op)
    graded = op in ("bwd", "fwd_bwd")
    leaves = [flip(x).detach().requires_grad_(graded) for x in (problem.q, problem.k, problem.v)]
    wanted = leaves + [x.requires_grad_(graded) for x in problem.with_gradient()]
    dout = flip(problem.dout)

    def forward() -> Tensor:
        with implementation.context():
            return attend(*leaves)

    def back(results: list[Tensor]) -> list[Tensor]:
        tensors = [x.transpose(1, 2) if implementation.heads_first else x for x in results]
        return [*tensors[: 4 if op == "fwd_bwd" else 3]]

    if op == "bwd":
        out = forward()
        return lambda: back(list(torch.autograd.grad(out, wanted, dout, retain_graph=True)))
    if op == "fwd_bwd":

        def both() -> list[Tensor]:
            out = forward()
            return back([out, *torch.autograd.grad(out, wanted, dout)])

        return both
    return lambda: back([forward()])
