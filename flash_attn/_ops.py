# SPDX-License-Identifier: BSD-3-Clause
"""The operators: loads the libraries, gives each operator its fake kernel and its autograd, and
holds `call`, the one function through which the package calls them.

Schemas, with the shape of every argument: csrc/torch/schema.cpp. The import order matters: torch,
the CPU library (it defines the schemas), the CUDA library (it only adds kernels), then what is
registered here.
"""

from __future__ import annotations

import importlib
import re

import torch
from torch import Tensor

from . import _C_cpu


def _load(name: str):
    """A module of the package that may be missing, and why it is."""
    try:
        return importlib.import_module(f"{__package__}.{name}"), ""
    except ImportError as error:
        return None, str(error)


_C_cuda, CUDA_MISSING = _load("_C_cuda")
# The planner for Python. It is built for one CPython; nothing but `explain` needs it.
_host, HOST_MISSING = _load("_host")
if _host is not None:
    for _library in (_C_cpu, _C_cuda):
        if _library is not None:
            _host.register_table(_library.kernel_rows)

OPERATORS = ("forward", "backward", "delta", "append_kv", "rotary")
forward = torch.ops.flash_attn.forward.default
backward = torch.ops.flash_attn.backward.default
delta = torch.ops.flash_attn.delta.default
append_kv = torch.ops.flash_attn.append_kv.default
rotary = torch.ops.flash_attn.rotary.default


def missing_kernels(key: str) -> list[str]:
    """Operators without a kernel for a dispatch key ("CPU", "CUDA"): registration fails in
    silence."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in OPERATORS if not has_kernel(f"flash_attn::{name}", key)]


# ---- calling


_MARKED = re.compile(
    r"\[flash_attn:(ValueError|TypeError|NotImplementedError|OutOfMemoryError)\] ?([^\n]*)"
)
_TYPES = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    "OutOfMemoryError": torch.OutOfMemoryError,
}


def call(operator, *arguments):
    """Calls an operator below autograd; what it throws arrives with its proper type.

    Only RuntimeError crosses the stable ABI, so the C++ side marks its text with the type.
    """
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return operator._op(*arguments)  # what operator(…) calls, without its frame
    except RuntimeError as error:
        raise typed_error(error, operator, arguments) from None


def run(operator, *arguments):
    """`call`, or under torch.compile the operator alone, as the tracer wants it."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    return call(operator, *arguments)


def typed_error(error: RuntimeError, operator, arguments) -> Exception:
    """The exception that a RuntimeError from an operator stands for, or itself."""
    text = str(error)
    marked = _MARKED.search(text)
    if marked:
        return _TYPES[marked[1]](f"flash_attn: {marked[2].removeprefix('flash_attn: ').rstrip()}")
    if isinstance(error, NotImplementedError) and "sharding strategy" in text:
        return NotImplementedError(
            "flash_attn: DTensors need `import flash_attn.integrations.torch_dtensor`, once"
        )
    if isinstance(error, NotImplementedError):  # torch's dispatcher: no kernel for the device
        device = next(x.device.type for x in arguments if isinstance(x, Tensor))
        return NotImplementedError(f"flash_attn: {no_kernel(operator._opname, device)}")
    return error


def no_kernel(name: str, device: str) -> str:
    """Why an operator has no kernel for a device type, and what would do."""
    if device == "cuda" and _C_cuda is None:
        reason = (
            f"the CUDA library of flash_attn is not there ({CUDA_MISSING}); reinstall where nvcc "
            f"is "
            "found (CUDA_HOME)"
        )
    else:
        reason = f"this build has no kernel of `{name}` for {device} tensors"
    return f'{reason}. backend="reference" runs anywhere, slowly'


# ---- fake kernels: shapes, dtypes and strides of what the operators return


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of lse and of accumulated gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("flash_attn::forward")
def _(q, k, v, cu_seqlens_q, *rest):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if cu_seqlens_q is not None:
        shape = (q.shape[1], q.shape[0])
    else:
        shape = (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(shape, dtype=stats_dtype(q.dtype))


@torch.library.register_fake("flash_attn::backward")
def _(dout, dlse, q, k, v, out, lse, cu_q, cu_k, seqused_k, bias, slopes, sinks, *rest):
    needs = rest[-2]
    stats = stats_dtype(q.dtype)
    wanted = (
        (q, q.dtype),
        (k, q.dtype),
        (v, q.dtype),
        (bias, stats),
        (slopes, torch.float32),
        (sinks, stats),
    )
    return tuple(
        q.new_empty(tensor.shape if needs >> bit & 1 else (0,), dtype=dtype)
        for bit, (tensor, dtype) in enumerate(wanted)
    )


@torch.library.register_fake("flash_attn::delta")
def _(out, dout):
    if out.dim() == 3:
        shape = (out.shape[1], out.shape[0])
    else:
        shape = (out.shape[0], out.shape[2], out.shape[1])
    return out.new_empty(shape, dtype=stats_dtype(out.dtype))


@torch.library.register_fake("flash_attn::append_kv")
def _(*arguments):
    return None


@torch.library.register_fake("flash_attn::rotary")
def _(x, *rest):
    return x.new_empty(x.shape)
