# SPDX-License-Identifier: BSD-3-Clause
"""Refuses bad arguments before anything runs, each with its name, what came and what is allowed.

TypeError for dtypes and kinds, ValueError for shapes and values, NotImplementedError for features.
Only what the host knows is looked at: shapes and dtypes, never the contents of a tensor. `inputs`
runs at every call and is kept cheap; the others run only for arguments that were given.
"""

from __future__ import annotations

import math
import os
from numbers import Real
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ._block_arguments import is_int
from .masks import LONGEST, BlockMask

DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
# What torch.autocast casts: fp64 stays, as everywhere in torch, and integers stay what they are.
_CAST = frozenset((torch.float16, torch.bfloat16, torch.float32))
# The operators' `family`; the reference is no family of kernels.
FAMILIES = {None: 0, "cpu": 1, "sm80": 2, "sm90": 3, "reference": -1}
REFERENCE = FAMILIES["reference"]
# What os.environ keeps inside: looking there costs a tenth of os.environ.get, and every call looks.
_ENVIRONMENT = os.environ._data
_BACKEND_KEY = os.environ.encodekey("FLASH_ATTN_BACKEND")


def shape_error(message: str) -> NoReturn:
    raise ValueError(f"flash_attn: {message}")


def shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


# ---- q, k, v


class Layout(NamedTuple):
    """How q, and k and v, lie; the texts are for messages."""

    rank_q: int
    rank_k: int
    shape_q: str
    shape_k: str
    k: str = "k"
    v: str = "v"


_BATCHED, _PACKED = "(batch, seqlen, num_heads, head_dim)", "(total, num_heads, head_dim)"
_CAPACITY = "(batch, capacity, num_heads_k, head_dim)"
_PAGES = "(num_pages, page_size, num_heads_k, head_dim)"
DENSE = Layout(4, 4, _BATCHED, _BATCHED)
PACKED = Layout(3, 3, _PACKED, _PACKED)
PACKED_PAGED = Layout(3, 4, _PACKED, _PAGES)
CACHE = Layout(4, 4, _BATCHED, _CAPACITY, "k_cache", "v_cache")
CACHE_PAGED = Layout(4, 4, _BATCHED, _PAGES, "k_cache", "v_cache")


def inputs(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, cast: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks what must agree; returns q, k, v as the kernels take them.

    Under torch.autocast that is in its dtype if `cast` (fp64 stays, as everywhere in torch), and
    always with a contiguous last dimension. One function for all of it: each call of another would
    show on tiny tensors.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kind_error(("q", q), (layout.k, k), (layout.v, v))
    device, dtype = q.device, q.dtype
    if cast and autocast(device):
        q, k, v = _autocast(q, k, v)
        dtype = q.dtype
    try:
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    except RuntimeError:  # strided nested tensors have none
        _layout_error(q, k, v, layout)
    rank = layout.rank_k
    if len(q_shape) != layout.rank_q or len(k_shape) != rank or len(v_shape) != rank:
        _rank_error(q, k, v, layout)
    if k.dtype is not dtype or v.dtype is not dtype or dtype not in DTYPES:
        _dtype_error(q, k, v, layout)
    if k.device != device or v.device != device:
        shape_error(
            f"q, {layout.k} and {layout.v} must be on one device, got {device}, {k.device} and "
            f"{v.device}"
        )
    head_dim, heads, heads_k = q_shape[-1], q_shape[-2], k_shape[-2]
    if k_shape[-1] != head_dim or head_dim < 1 or v_shape[-1] < 1:
        _head_dim_error(q, k, v, layout)
    # By index: slices of a torch.Size cost more than all of these.
    if v_shape[-2] != heads_k or v_shape[0] != k_shape[0] or v_shape[1] != k_shape[1]:
        shape_error(
            f"{layout.k} and {layout.v} must agree in all but head_dim, {layout.shape_k}, got "
            f"{shape(k)} and {shape(v)}"
        )
    if heads != heads_k and (heads_k == 0 or heads % heads_k):
        shape_error(
            f"num_heads must be a multiple of num_heads_k, got {heads} and {heads_k} "
            f"(q.shape[-2], {layout.k}.shape[-2])"
        )
    if layout is DENSE and q_shape[0] != k_shape[0]:
        shape_error(
            f"q and k must have one batch size, got {q_shape[0]} and {k_shape[0]} (shape[0])"
        )
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        if not (q.layout is k.layout is v.layout is torch.strided):
            _layout_error(q, k, v, layout)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _layout_error(q, k, v, layout: Layout) -> NoReturn:
    kinds = ("nested" if x.is_nested else str(x.layout) for x in (q, k, v))
    raise TypeError(
        f"flash_attn: q, {layout.k} and {layout.v} must be dense tensors, got {', '.join(kinds)}; "
        "sequences of several lengths are for flash_attn_varlen_func"
    )


def autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(cast(x, dtype) for x in (q, k, v))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as torch.autocast hands it on."""
    return x.to(dtype) if x.dtype in _CAST else x


def kind_error(*named: tuple[str, object]) -> NoReturn:
    for name, value in named:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"flash_attn: {name} must be a torch.Tensor, got {type(value).__name__}"
            )
    raise AssertionError("unreachable: all are tensors")


def _rank_error(q, k, v, layout: Layout) -> NoReturn:
    if q.dim() != layout.rank_q:
        shape_error(f"q must have shape {layout.shape_q}, got {shape(q)}")
    name, tensor = (layout.k, k) if k.dim() != layout.rank_k else (layout.v, v)
    shape_error(f"{name} must have shape {layout.shape_k}, got {shape(tensor)}")


def _dtype_error(q, k, v, layout: Layout) -> NoReturn:
    names = f"q, {layout.k} and {layout.v}"
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(
            f"flash_attn: {names} must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; "
            "torch.autocast casts q, k and v"
        )
    raise TypeError(
        f"flash_attn: {names} must be float16, bfloat16, float32 or float64, got {q.dtype}"
    )


def _head_dim_error(q, k, v, layout: Layout) -> NoReturn:
    if q.shape[-1] != k.shape[-1]:
        shape_error(
            f"q and {layout.k} must have one head_dim, got {q.shape[-1]} and {k.shape[-1]} "
            f"(q.shape[-1], {layout.k}.shape[-1])"
        )
    shape_error(
        f"head_dim and head_dim_v must be at least 1, got {q.shape[-1]} and {v.shape[-1]} "
        f"(q.shape[-1], {layout.v}.shape[-1])"
    )


# ---- numbers


def whole(value) -> bool:
    """Whether it is an int of Python's or numpy's, or one that a graph holds."""
    return isinstance(value, torch.SymInt) or is_int(value)


def real(name: str, value, allowed: str) -> float:
    """A finite number of Python's or numpy's; a 0-d CPU tensor is accepted."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, (bool, complex)) or not isinstance(
        value, (int, float, torch.SymInt, torch.SymFloat, Real)
    ):
        found = (
            f"a tensor of shape {shape(value)} on {value.device}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise TypeError(f"flash_attn: {name} must be {allowed}, got {found}")
    if not -math.inf < value < math.inf:
        shape_error(f"{name} must be {allowed}, got {value}")
    return float(value)


def _held(name: str, number: float, dtype: torch.dtype) -> float:
    """Refuses what overflows or vanishes in the arithmetic of inputs of this dtype.

    The kernels multiply by log2(e) and divide by a softcap: both must stay finite.
    """
    least, most = (-1022, 1023) if dtype == torch.float64 else (-126, 127)
    if number != 0 and not 2.0**least <= abs(number) <= 2.0**most:
        shape_error(
            f"{name} must be 0 or of magnitude 2**{least} to 2**{most} ({2.0**least:.2g} to "
            f"{2.0**most:.2g}) for {dtype} inputs, got {number}"
        )
    return number


def scale(value, dtype: torch.dtype) -> float:
    return _held("softmax_scale", real("softmax_scale", value, "a finite number"), dtype)


def softcap(value, dtype: torch.dtype) -> float:
    allowed = "a finite number >= 0 (0 is off)"
    number = real("softcap", value, allowed)
    if number < 0:
        shape_error(f"softcap must be {allowed}, got {value}")
    return _held("softcap", number, dtype)


def flag(name: str, value) -> bool:
    """A bool, numpy's and torch's symbolic ones included, or an int that is 0 or 1."""
    if isinstance(value, (bool, torch.SymBool)):
        return bool(value)
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    if isinstance(value, int):
        if value == 0 or value == 1:
            return value == 1
        shape_error(f"{name} must be a bool, or 0 or 1, got {value}")
    raise TypeError(f"flash_attn: {name} must be a bool, got {kind.__name__}")


def dropout(value) -> float:
    allowed = "a number with 0 <= dropout_p < 1"
    number = real("dropout_p", value, allowed)
    if not 0 <= number < 1:
        shape_error(f"dropout_p must be {allowed}, got {value}")
    return number


def window(value) -> tuple[int, int]:
    """(left, right) of a tuple, a list or a CPU integer tensor."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.is_floating_point() or value.dtype == torch.bool:
            raise TypeError(
                "flash_attn: window_size as a tensor must hold integers on the CPU, got "
                f"{value.dtype} on {value.device}"
            )
        pair = value.tolist()
    else:
        pair = value
    if not isinstance(pair, (tuple, list)):
        raise TypeError(
            "flash_attn: window_size must be a tuple, a list or a CPU integer tensor of two ints, "
            "got "
            f"{type(value).__name__}"
        )
    if len(pair) != 2:
        shape_error(f"window_size must hold two ints (left, right), got {len(pair)} values")
    for side in pair:
        if not whole(side):
            raise TypeError(
                f"flash_attn: window_size must hold ints, -1 for unlimited, got "
                f"{type(side).__name__}"
            )
        if side < -1:
            shape_error(
                "window_size must hold ints >= 0, or -1 for unlimited on that side, "
                f"got {tuple(int(x) for x in pair)}"
            )
    left, right = pair
    # Not unlimited: a window, however wide, makes the cache's queries move (rotary).
    return (LONGEST if left > LONGEST else left), (LONGEST if right > LONGEST else right)


def family(backend: str | None) -> int:
    """The operators' number of a backend; unset, FLASH_ATTN_BACKEND decides."""
    source = "backend"
    if backend is None:
        if _BACKEND_KEY not in _ENVIRONMENT:
            return 0
        backend = os.environ.get("FLASH_ATTN_BACKEND")
        source = "FLASH_ATTN_BACKEND"
        if not backend:
            return 0
    if not isinstance(backend, str):
        raise TypeError(f"flash_attn: backend must be a str or None, got {type(backend).__name__}")
    if backend not in FAMILIES:
        names = ", ".join(repr(name) for name in FAMILIES if name)
        shape_error(f"{source} must be one of {names}, or None, got {backend!r}")
    return FAMILIES[backend]


# ---- tensors that may be given


def optional(name: str, tensor, q: Tensor, *dtypes: torch.dtype) -> None:
    """Kind, dtype and device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"flash_attn: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        *names, last = (str(x).removeprefix("torch.") for x in dict.fromkeys(dtypes))
        names = f"{', '.join(names)} or {last}" if names else last
        raise TypeError(f"flash_attn: {name} must be {names}, got {tensor.dtype}")
    if tensor.device != q.device:
        shape_error(f"{name} must be on q's device, {q.device}, got {tensor.device}")


def _broadcasts(size: int, whole: int) -> bool:
    # Not `in`: under torch.compile that does not compare symbolic sizes by value.
    return size == 1 or size == whole


def slopes(tensor, q: Tensor, batch: int) -> Tensor:
    optional("alibi_slopes", tensor, q, torch.float32)
    heads = q.shape[-2]
    by_batch = tensor.dim() == 2 and tensor.shape[0] == batch
    if (tensor.dim() != 1 and not by_batch) or tensor.shape[-1] != heads:
        shape_error(
            f"alibi_slopes must have shape (num_heads,) or (batch, num_heads), ({heads},) or "
            f"({batch}, {heads}), got {shape(tensor)}"
        )
    return tensor


def _as_autocast(tensor, q: Tensor):
    """What had the dtype of q before torch.autocast changed that."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    return tensor.to(q.dtype) if autocast(q.device) and q.dtype in _CAST else tensor


def bias(
    tensor, q: Tensor, batch: int, seqlen_q: int | None, seqlen_k: int | None, longer: bool
) -> Tensor:
    """4-D attn_bias. A length is None where only the device knows it; `longer`: it may exceed
    seqlen_k."""
    tensor = _as_autocast(tensor, q)
    optional("attn_bias", tensor, q, torch.bool, q.dtype, torch.float32)
    if tensor.dim() > 4:
        shape_error(f"attn_bias must have at most 4 dimensions, got shape {shape(tensor)}")
    if tensor.dim() < 4:
        tensor = tensor[(None,) * (4 - tensor.dim())]
    sizes = tensor.shape
    right = _broadcasts(sizes[0], batch) and _broadcasts(sizes[1], q.shape[-2])
    if seqlen_q is not None:
        right = right and _broadcasts(sizes[2], seqlen_q)
    if seqlen_k is not None:
        right = right and (_broadcasts(sizes[3], seqlen_k) or (longer and sizes[3] > seqlen_k))
    if not right:
        lengths = [
            "longest seqlen_q" if seqlen_q is None else seqlen_q,
            "longest seqlen_k" if seqlen_k is None else seqlen_k,
        ]
        shape_error(
            "attn_bias must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k), "
            f"({batch}, {q.shape[-2]}, {lengths[0]}, {lengths[1]}), got {shape(tensor)}"
        )
    # The kernels read a bias of fp64 inputs as fp64.
    return tensor.double() if q.dtype == torch.float64 and tensor.is_floating_point() else tensor


def sinks(learnable_sink, s_aux, q: Tensor) -> Tensor:
    if learnable_sink is not None and s_aux is not None:
        shape_error("learnable_sink and s_aux are two names of one argument, got both")
    name = "learnable_sink" if s_aux is None else "s_aux"
    tensor = _as_autocast(learnable_sink if s_aux is None else s_aux, q)
    optional(name, tensor, q, q.dtype, torch.float32)
    if tensor.dim() != 1 or tensor.shape[0] != q.shape[-2]:
        shape_error(f"{name} must have shape (num_heads,), ({q.shape[-2]},), got {shape(tensor)}")
    return tensor.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()


def not_a_block_mask(mask) -> NoReturn:
    kind, how = type(mask), ""
    if kind.__module__ == "torch.nn.attention.flex_attention":
        how = " of FlexAttention; convert it once, by BlockMask.from_flex_attention(block_mask)"
    raise TypeError(
        f"flash_attn: block_mask must be a flash_attn.BlockMask, got {kind.__name__}{how}"
    )


def block_mask(mask, q: Tensor, batch: int, seqlen_q: int | None, seqlen_k: int | None) -> None:
    if not isinstance(mask, BlockMask):
        not_a_block_mask(mask)
    if mask.device != q.device:
        shape_error(f"block_mask must be on q's device, {q.device}, got {mask.device}")
    mask_batch, mask_heads, rows, columns = mask.shape
    if not (_broadcasts(mask_batch, batch) and _broadcasts(mask_heads, q.shape[-2])):
        shape_error(
            f"block_mask must be of batch 1 or {batch} and heads 1 or {q.shape[-2]}, got "
            f"{mask_batch} "
            f"and {mask_heads}"
        )
    sides = (("rows", rows, seqlen_q, 0), ("columns", columns, seqlen_k, 1))
    for name, blocks, length, side in sides:
        size = mask.block_size[side]
        if length is not None and mask.seqlens is not None and mask.seqlens[side] != length:
            shape_error(
                f"block_mask was made for {'seqlen_q' if side == 0 else 'seqlen_k'} "
                f"{mask.seqlens[side]}, got {length}"
            )
        if length is not None and blocks != (length + size - 1) // size:
            shape_error(
                f"block_mask must have {(length + size - 1) // size} block {name} for "
                f"{'seqlen_q' if side == 0 else 'seqlen_k'} {length} in blocks of {size}, got "
                f"{blocks}"
            )


def _int32(tensor: Tensor) -> Tensor:
    """What int32 does not hold becomes its nearest, which is out of every range: never a value that
    would do."""
    if tensor.dtype == torch.int32:
        return tensor
    return tensor.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def cu_seqlens(name: str, tensor, q: Tensor) -> Tensor:
    optional(name, tensor, q, torch.int32, torch.int64)
    if tensor.dim() != 1 or tensor.shape[0] < 1:
        shape_error(f"{name} must have shape (batch + 1,), got {shape(tensor)}")
    return _int32(tensor).contiguous()


def per_batch(name: str, tensor, q: Tensor, batch: int) -> Tensor:
    """An integer for each batch entry: seqused_k, cache_leftpad, cache_batch_idx, …"""
    optional(name, tensor, q, torch.int32, torch.int64)
    if tensor.dim() != 1 or tensor.shape[0] != batch:
        shape_error(f"{name} must have shape (batch,), ({batch},), got {shape(tensor)}")
    return _int32(tensor).contiguous()


def block_table(tensor, q: Tensor, batch: int, pages: Tensor, name: str) -> Tensor:
    """The table of a cache; `pages` is its key tensor, the argument `name`."""
    optional("block_table", tensor, q, torch.int32, torch.int64)
    if tensor.dim() != 2 or tensor.shape[0] != batch:
        shape_error(
            f"block_table must have shape (batch, max_pages), ({batch}, …), got {shape(tensor)}"
        )
    if pages.shape[1] < 1:
        shape_error(f"{name} must have pages of at least one slot, {_PAGES}, got {shape(pages)}")
    tensor = _int32(tensor)
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def ragged(q, k, v, cu_q, cu_k, used, table, others):
    """Of the varlen forms: (batch, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table).

    others: what else might require a gradient, which a block_table does not allow.
    """
    shared = cu_k is cu_q
    cu_q = cu_seqlens("cu_seqlens_q", cu_q, q)
    cu_k = cu_q if shared else cu_seqlens("cu_seqlens_k", cu_k, q)
    batch = cu_q.shape[0] - 1
    if cu_k.shape[0] != batch + 1:
        shape_error(
            "cu_seqlens_q and cu_seqlens_k must have one length, batch + 1, got "
            f"{cu_q.shape[0]} and {cu_k.shape[0]}"
        )
    if used is not None:
        used = per_batch("seqused_k", used, q, batch)
    if table is not None:
        table = block_table(table, q, batch, k, "k")
        no_gradient("block_table", q, k, v, *others)
    return batch, cu_q, cu_k, used, table


def no_gradient(what: str, *inputs) -> None:
    """Raises where autograd would expect a gradient that does not exist."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise NotImplementedError(
            f"flash_attn: {what} has no backward, and an input requires a gradient; call it under "
            "torch.no_grad(), detach the inputs, or use flash_attn_func or flash_attn_varlen_func "
            "without a cache"
        )


def splits(value) -> None:
    if not is_int(value):
        raise TypeError(f"flash_attn: num_splits must be an int, got {type(value).__name__}")
    if value < 0:
        shape_error(f"num_splits must be >= 0 (0 lets the planner choose), got {value}")
