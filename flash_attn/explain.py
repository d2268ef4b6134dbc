# SPDX-License-Identifier: BSD-3-Clause
"""Two questions one may ask of a call: which kernel would run (`explain`), and how exact it is
(`check`)."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _checks, _ops, interface, reference
from ._philox import draw_seed, realised_dropout
from .masks import BlockMask


@dataclass
class Explanation:
    """What `explain` found; print it.

    Attributes:
        problem: the call in one line.
        backend: "cpu", "sm80", "sm90" or "reference"; None when nothing serves the call, or when
            the planner is missing.
        plans: per pass ("forward", "backward") the chosen kernel with its tiles, splits and
            scratch.
        reasons: per pass one line for each kernel that is not taken.
        notes: what else matters: libraries that are missing, memory that the reference would take.
    """

    problem: str
    backend: str | None = None
    plans: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.problem]
        for name, plan in self.plans.items():
            lines.append(f"{name}: {plan}")
            lines += [f"  not taken: {reason}" for reason in _grouped(self.reasons.get(name, ()))]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def _grouped(reasons: Sequence[str]) -> list[str]:
    """Kernels that are passed over for one reason on one line."""
    kernels: dict[str, list[str]] = {}
    for reason in reasons:
        kernel, _, text = reason.partition(": ")
        kernels.setdefault(text, []).append(kernel)
    return [
        names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "") + f": {text}"
        for text, names in kernels.items()
    ]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Explanation:
    """Says which kernels `flash_attn_func` would run on these arguments, and why not the others.

    Takes what `flash_attn_func` takes and raises what it raises for bad arguments, but runs
    nothing. The answer needs the planner (flash_attn._host); without it, it says how to get it.

    Returns:
        An `Explanation`; print it.
    """
    _validate(
        q, k, v,
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, attn_bias=attn_bias,
        learnable_sink=learnable_sink, s_aux=s_aux, block_mask=block_mask,
    )  # fmt: skip
    family = _checks.family(backend)
    q, k, v = _checks.inputs(q, k, v, _checks.DENSE)
    answer = Explanation(
        f"flash_attn_func on q {_text(q)}, k {_text(k)}, v {_text(v)}, {str(q.dtype)[6:]}, "
        f"{q.device}"
    )
    if family == _checks.REFERENCE:
        answer.backend = "reference"
        answer.plans = {
            "forward": "plain torch (flash_attn.reference)",
            "backward": "torch's autograd",
        }
        size = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
        answer.notes.append(f"memory quadratic in the lengths: {size} scores, several times over")
        return answer
    if q.device.type == "meta":
        answer.notes.append("meta tensors hold no values: the call gives their shapes, no kernel")
    elif "forward" in _ops.missing_kernels(q.device.type.upper()):
        answer.notes.append(_ops.no_kernel("forward", q.device.type))
    if _ops._host is None:
        answer.notes.append(f"no plan: {host_missing()}")
    elif q.device.type in ("cpu", "cuda") and k.shape[2] > 0:
        left, right = _checks.window(window_size)
        _plan(
            answer,
            backend=""
            if family == 0
            else next(name for name, n in _checks.FAMILIES.items() if n == family),
            **describe_device(q.device),
            dtype=str(q.dtype).removeprefix("torch."),
            batch=q.shape[0],
            seqlen_q=q.shape[1],
            seqlen_k=k.shape[1],
            heads_q=q.shape[2],
            heads_k=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            boxes=_in_boxes(k) and _in_boxes(v),
            softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale),
            window_left=left,
            window_right=0 if causal else right,
            softcap=float(softcap),
            bias=attn_bias is not None,
            **({} if attn_bias is None else {"bias_boxes": _bias_in_boxes(attn_bias)}),
            alibi=alibi_slopes is not None,
            dropout=realised_dropout(float(dropout_p)) > 0,
            sinks=learnable_sink is not None or s_aux is not None,
            block_q=0 if block_mask is None else block_mask.block_size[0],
            block_k=0 if block_mask is None else block_mask.block_size[1],
        )
    return answer


def _plan(answer: Explanation, **description) -> None:
    """Asks the planner (csrc/host/bindings.cpp names the keys) and fills in what it says."""
    for name in ("forward", "backward"):
        plan = _ops._host.plan({"pass": name, **description})
        answer.plans[name] = plan["text"].splitlines()[0]  # the rest are the reasons
        answer.reasons[name] = plan["reasons"]
        if name == "forward":
            answer.backend = plan["backend"]


def _in_boxes(x: Tensor) -> bool:
    """Whether the copy engine reads a tensor: its rows are whole 16 bytes, and none stands
    twice."""
    each = 16 // x.element_size()
    strides = [s for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s % each == 0 for s in strides)


def _bias_in_boxes(bias: Tensor) -> bool:
    """The same of a bias or mask, of which no more than 16 bits an element."""
    last = bias.stride(-1) == 1 and bias.shape[-1] > 1
    strides = [s for s, size in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if size > 1]
    each = 16 // bias.element_size()
    return last and each > 4 and bias.data_ptr() % 16 == 0 and all(s % each == 0 for s in strides)


def describe_device(device: torch.device) -> dict[str, int | str]:
    """What the planner knows of a device (csrc/host/bindings.cpp names the keys)."""
    if device.type == "cpu":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    smem = properties.shared_memory_per_block_optin
    with torch.cuda.device(device):  # a build may hold older code for this GPU
        code = _ops._host.cuda_code()
    limits = os.environ.get("FLASH_ATTN_CUDA_LIMITS", "").split(":")
    if len(limits) == 2:
        arch, smem = min(arch, int(limits[0])), min(smem, int(limits[1]))
    return {
        "device": "cuda",
        "arch": min(arch, code) if code else arch,
        "sm_count": properties.multi_processor_count,
        "smem_per_block": smem,
        "l2_bytes": properties.L2_cache_size,
        "any_speed": len(limits) == 2,
    }


def _validate(q, k, v, *, block_mask, **options) -> None:
    """Runs the call's checks, and no kernel: on tensors that have shapes and dtypes but no
    memory."""
    tensors = {"q": q, "k": k, "v": v, **options}
    for name, value in tensors.items():
        if isinstance(value, Tensor) and isinstance(q, Tensor) and name != "window_size":
            if value.device != q.device and value.dim() > 0:
                _checks.shape_error(f"{name} must be on q's device, {q.device}, got {value.device}")
            tensors[name] = value.detach().to("meta") if value.dim() > 0 else value
    if isinstance(block_mask, BlockMask):
        block_mask = block_mask.to("meta")
    interface.flash_attn_func(**tensors, block_mask=block_mask)


def host_missing() -> str:
    """Why the planner cannot be imported, and what helps; empty when it is there."""
    if _ops._host is not None:
        return ""
    python = f"CPython {sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"the planner flash_attn._host is not there for this {python} ({_ops.HOST_MISSING}); it "
        f"is built "
        "for one CPython, reinstall flash-attn with this one. Attention itself works without it"
    )


def _text(x: Tensor) -> str:
    return str(tuple(x.shape))


# ---- check


@dataclass
class Check:
    """What `check` found; print it.

    Attributes:
        rows: (name, our error, the reference's error, the limit), the errors being the largest
            absolute differences from the exact answer.
    """

    rows: list[tuple[str, float, float, float]]

    @property
    def ok(self) -> bool:
        """Whether every error of ours is within its limit."""
        return all(ours <= limit for _, ours, _, limit in self.rows)

    def __str__(self) -> str:
        lines = [f"{'error of':18}{'flash_attn':>12}{'reference':>12}{'limit':>12}"]
        for name, ours, low, limit in self.rows:
            verdict = "" if ours <= limit else "  over the limit"
            lines.append(f"{name:18}{ours:12.2e}{low:12.2e}{limit:12.2e}{verdict}")
        return "\n".join(lines)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    block_mask: BlockMask | None = None,
    backend: str | None = None,
) -> Check:
    """Compares `flash_attn_func` with the exact answer, beside what plain torch reaches in q's
    dtype.

    Exact is `reference.attention` in float64; the reference's error is that of the same function in
    q's dtype, for gradients the larger of autograd's and of the formulas applied to the rounded
    out. Both take memory quadratic in the lengths: choose a small problem. Covers out, lse and the
    gradients of all floating inputs, for random upstream gradients of out and lse. The limit is
    twice the reference's error + 1e-5; in float64 1e-9 * (1 + the largest element).

    Takes what `flash_attn_func` takes and raises what it raises. The inputs are not changed. It
    differentiates under torch.no_grad() too, and takes no notice of torch.autocast.

    Returns:
        A `Check`; print it, or ask it `ok`.
    """
    if not isinstance(q, Tensor):
        _checks.kind_error(("q", q))
    plain = torch.autocast(q.device.type, enabled=False)
    with plain, torch.inference_mode(False), torch.enable_grad():
        return _check(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, attn_bias, learnable_sink, s_aux, block_mask, backend,
        )  # fmt: skip


def _check(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    attn_bias, learnable_sink, s_aux, block_mask, backend,
) -> Check:  # fmt: skip
    """`check` by position, in grad mode and without autocast."""
    with torch.random.fork_rng([q.device] if q.device.type == "cuda" else []):
        philox = draw_seed(q.device)  # what the call below draws
    options = dict(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        block_mask=block_mask,
    )  # fmt: skip
    sink = "s_aux" if s_aux is not None else "learnable_sink"
    given = {"q": q, "k": k, "v": v, "attn_bias": attn_bias, "alibi_slopes": alibi_slopes}
    given |= {"learnable_sink": learnable_sink, "s_aux": s_aux}
    ours = _leaves(given, None)
    results = interface.flash_attn_func(
        **ours,
        **options,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=True,
        backend=backend,
    )
    generator = torch.Generator(q.device).manual_seed(0)
    upstream = [
        torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) for x in results
    ]
    options |= {"dropout_p": realised_dropout(dropout_p), "philox": philox}
    given["learnable_sink"] = given.pop("s_aux") if sink == "s_aux" else learnable_sink
    given.pop("s_aux", None)

    def evaluate(dtype: torch.dtype):
        leaves = _leaves(given, torch.float64 if dtype == torch.float64 else None)
        outputs = reference.attention(**leaves, **options, compute_dtype=dtype)
        return leaves, outputs, _gradients(leaves, outputs, upstream)

    _, exact, exact_grads = evaluate(torch.float64)
    leaves, low, low_grads = evaluate(q.dtype)
    formula = reference.attention_backward(
        *upstream, out=low[0].detach(), lse=low[1].detach(), **_detached(leaves), **options,
        compute_dtype=q.dtype,
    )  # fmt: skip
    our_grads = _gradients(ours, results, upstream)
    if sink == "s_aux" and "s_aux" in our_grads:
        our_grads["learnable_sink"] = our_grads.pop("s_aux")
    rows = [
        _row(name, ours, want, [got], q.dtype)
        for name, ours, want, got in zip(("out", "lse"), results, exact, low, strict=True)
    ]
    rows += [
        _row(f"d {name}", our_grads[name], want, [low_grads[name], formula[name]], q.dtype)
        for name, want in exact_grads.items()
    ]
    return Check(rows)


def _leaves(given: dict[str, Tensor | None], dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    """Copies that gather gradients; in `dtype` if there is one."""
    return {
        name: x
        if x is None or not x.is_floating_point()
        else x.detach().to(dtype or x.dtype).clone().requires_grad_()
        for name, x in given.items()
    }


def _detached(leaves: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if x is None else x.detach() for name, x in leaves.items()}


def _gradients(leaves, outputs, upstream) -> dict[str, Tensor]:
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    upstream = [gradient.to(x.dtype) for gradient, x in zip(upstream, outputs, strict=True)]
    return dict(
        zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), upstream), strict=True)
    )


def _row(name: str, ours: Tensor, exact: Tensor, references: list[Tensor], dtype: torch.dtype):
    low = max(_error(x, exact) for x in references)
    if dtype == ours.dtype == torch.float64:  # slopes are float32 beside float64 inputs
        finite = exact.detach()[exact.isfinite()].abs()
        limit = 1e-9 * (1 + (float(finite.max()) if finite.numel() else 0.0))
    else:
        limit = 2 * low + 1e-5
    return name, _error(ours, exact), low, limit


def _error(x: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; 0 where both are the same infinity, NaN counts as infinite."""
    x, exact = x.detach().double(), exact.detach().double()
    difference = torch.where(x == exact, 0.0, (x - exact).abs()).nan_to_num(nan=math.inf)
    return float(difference.max()) if difference.numel() else 0.0
