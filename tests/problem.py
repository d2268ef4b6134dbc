# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a Case, our result, the oracle's result, and the comparison.

Inputs lie by default inside larger buffers full of NaN, with heads before rows in memory and a
start that no vector load likes; packed tensors have spare NaN rows at the end. `check` is what
most tests call.
"""

import oracle
import torch

import flash_attn
from flash_attn import _host as host

SPARE_ROWS = 3
BACKWARD_HEAD_DIM = 256  # what the specification promises of a GPU; more where there are rows


def poison(x, swap=True, aligned=False):
    """x's values inside a larger buffer of NaN (True for masks): strides that are not x's, and an
    odd start; or, aligned, 16-bit rows that all begin at multiples of 16 bytes."""
    swap = swap and x.dim() >= 3
    inner = x.transpose(-3, -2) if swap else x
    step = 8 if aligned else 1
    sizes = [-(-size // step) * step + 3 * step for size in inner.shape]
    fill = True if x.dtype == torch.bool else float("nan")
    buffer = torch.full(sizes, fill, dtype=x.dtype, device=x.device)
    view = buffer[tuple(slice(step, step + size) for size in inner.shape)]
    view.copy_(inner)
    return view.transpose(-3, -2) if swap else view


def has_backward(device, *head_dims):
    """Whether these head_dims have gradients on the device; beyond, the forward alone is tested."""
    if torch.device(device).type == "cpu":
        return True
    rows = [row for row in host.rows() if row["arch"] > 0 and row["pass"] == "backward"]
    return max(head_dims) <= max([row["head_dim"] for row in rows] + [BACKWARD_HEAD_DIM])


class Problem:
    """The inputs of one case and draw. `leaves` holds what can have a gradient."""

    def __init__(self, case, device="cpu", seed=0):
        self.case, self.device, self.seed = case, torch.device(device), seed
        self.rng = torch.Generator().manual_seed(seed)
        dtype = case.torch_dtype
        if case.packed:
            q, k = case.seqlen_q, case.seqlen_k
            self.lens_q = [q, 2 * q // 3, 0, min(3, q)]
            self.lens_k = [k, k // 2, min(5, k), 0]
        else:
            self.lens_q = [case.seqlen_q] * case.batch
            self.lens_k = [case.seqlen_k] * case.batch
        self.batch = len(self.lens_q)
        self.longest = (
            max(self.lens_q, default=case.seqlen_q),
            max(self.lens_k, default=case.seqlen_k),
        )
        self.cu_q, self.cu_k = self.cumulate(self.lens_q), self.cumulate(self.lens_k)

        leaves = {
            "q": self.rows(self.lens_q, case.seqlen_q, case.heads, case.head_dim),
            "k": self.rows(self.lens_k, case.seqlen_k, case.heads_k, case.head_dim),
            "v": self.rows(self.lens_k, case.seqlen_k, case.heads_k, case.dim_v),
        }
        extra = dtype if not case.bias_fp32 or dtype == torch.float64 else torch.float32
        if case.bias:
            bias = self.make_bias(extra)
            leaves["bias"] = bias if case.contiguous else poison(bias, swap=False)
        if case.slopes:
            shape = (case.heads,) if case.slopes == "heads" else (self.batch, case.heads)
            leaves["slopes"] = self.draw(*shape).abs().mul(0.1).to(self.device, torch.float32)
        if case.sinks:
            leaves["sinks"] = self.draw(case.heads).to(self.device, extra)
        self.leaves = {
            name: x.detach().requires_grad_(x.is_floating_point()) for name, x in leaves.items()
        }
        self.blocks = self.make_blocks() if case.blocks else None
        self.dout = self.rows(self.lens_q, case.seqlen_q, case.heads, case.dim_v)
        self.dlse = self.draw(*self.lse_shape()).to(self.device) if case.lse_grad else None

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def cumulate(self, lengths):
        zero = torch.zeros(1, dtype=torch.int64)
        cu = torch.cat([zero, torch.tensor(lengths, dtype=torch.int64).cumsum(0)])
        return cu.to(self.device, torch.int32)

    def rows(self, lengths, seqlen, heads, dim):
        """(batch, seqlen, heads, dim), or packed with spare NaN rows."""
        if self.case.packed:
            x = self.draw(sum(lengths) + SPARE_ROWS, heads, dim)
            x[sum(lengths) :] = float("nan")
        else:
            x = self.draw(self.batch, seqlen, heads, dim)
        x = x.to(self.device, self.case.torch_dtype)
        return x if self.case.contiguous else poison(x, aligned=self.case.aligned)

    def make_bias(self, dtype):
        room = 2 if self.case.packed else 0  # may be larger than every length
        b, h = self.batch, self.case.heads
        q, k = self.longest[0] + room, self.longest[1] + room
        shape = {
            "full": (b, h, q, k),
            "row": (b, 1, q, 1),
            "column": (b, 1, 1, k),
            "head": (1, h, q, k),
            "one": (1, 1, 1, 1),
            "mask": (b, 1, q, k),
        }[self.case.bias]
        bias = self.draw(*shape)
        if self.case.bias == "mask":
            seen = bias > -0.3
            seen[:, :, 1::3] = False  # rows without a key
            return seen.to(self.device)
        return bias.to(self.device, dtype)

    def make_blocks(self):
        size_q, size_k = self.case.blocks
        counts = [-(-self.longest[0] // size_q), -(-self.longest[1] // size_k)]
        blocks = torch.rand(self.batch, self.case.heads, *counts, generator=self.rng) < 0.6
        blocks[:, :1, :1] = False  # a block row without a key
        if not self.case.bits:
            return blocks.to(self.device)
        # By element: a part of the blocks cut at random, with rows and columns that nobody sees.
        wide = blocks.repeat_interleave(size_q, 2).repeat_interleave(size_k, 3)
        seen = torch.rand(self.batch, self.case.heads, *self.longest, generator=self.rng) < 0.7
        seen[:, :, 5::11] = False
        seen[..., 3::13] = False
        whole = torch.rand(blocks.shape, generator=self.rng) < 0.3
        whole = whole.repeat_interleave(size_q, 2).repeat_interleave(size_k, 3)
        rows, columns = self.longest
        return ((seen | whole[:, :, :rows, :columns]) & wide[:, :, :rows, :columns]).to(self.device)

    def block_mask(self):
        """The argument: of whole blocks, or of the elements that `bits` asks for."""
        if not self.case.bits:
            return flash_attn.BlockMask.from_dense(self.blocks, self.case.blocks)
        return flash_attn.BlockMask.from_predicate(
            lambda b, h, q, k: self.blocks[b, h, q, k],
            *self.blocks.shape,
            self.case.blocks,
            self.device,
        )

    def lse_shape(self):
        if self.case.packed:
            return (self.case.heads, sum(self.lens_q) + SPARE_ROWS)
        return (self.batch, self.case.heads, self.case.seqlen_q)

    def arguments(self):
        """Keyword arguments of the public function: only what differs from its defaults."""
        case, args = self.case, {}
        plain = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
        plain |= {"dropout_p": case.dropout, "deterministic": case.deterministic}
        defaults = {"causal": False, "window_size": (-1, -1), "softcap": 0.0}
        defaults |= {"dropout_p": 0.0, "deterministic": False}
        args |= {name: value for name, value in plain.items() if value != defaults[name]}
        if case.scale is not None:
            args["softmax_scale"] = case.scale
        renamed = {"bias": "attn_bias", "slopes": "alibi_slopes", "sinks": "learnable_sink"}
        args |= {renamed[name]: self.leaves[name] for name in renamed if name in self.leaves}
        if self.blocks is not None:
            args["block_mask"] = self.block_mask()
        return args

    def call(self, backend=None, **more):
        """The public function on this problem's tensors, one seed every time."""
        torch.manual_seed(1000 + self.seed)
        q, k, v = (self.leaves[name] for name in "qkv")
        args = self.arguments() | more
        if backend is not None:
            args["backend"] = backend
        if self.case.packed:
            return flash_attn.flash_attn_varlen_func(
                q, k, v, self.cu_q, self.cu_k, *self.longest, **args
            )
        return flash_attn.flash_attn_func(q, k, v, **args)

    def ours(self, backend=None, gradients=True):
        """Our out, lse and gradients by name."""
        if not gradients:
            with torch.no_grad():
                out, lse = self.call(backend, return_lse=True)
            return {"out": out, "lse": lse}
        out, lse = self.call(backend, return_lse=True)
        return {"out": out.detach(), "lse": lse.detach()} | self.gradients(out, lse, self.leaves)

    def gradients(self, out, lse, leaves):
        """Gradients by name, 0 where nothing depends on a leaf."""
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        pairs = [(out, self.dout.to(out.dtype))]
        if self.dlse is not None:
            pairs.append((lse, self.dlse.to(lse.dtype)))
        # Without keys or queries the oracle's results depend on nothing.
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        if not pairs:
            return {f"d{name}": torch.zeros_like(x) for name, x in wanted.items()}
        results, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, list(wanted.values()), grads, materialize_grads=True)
        return {f"d{name}": grad for name, grad in zip(wanted, found, strict=True)}

    def rule(self, b, keep):
        case = self.case
        scale = oracle.default_scale(case.head_dim) if case.scale is None else case.scale
        window = (case.window[0], 0) if case.causal else case.window
        rule = oracle.Rule(scale, window, case.softcap, dropout_p=case.dropout)
        if self.blocks is not None:
            rule.blocks, rule.block_size = self.blocks[b], (1, 1) if case.bits else case.blocks
        if keep is not None:
            len_q, len_k = self.longest
            if case.packed:
                len_q, len_k = self.lens_q[b.start], self.lens_k[b.start]
            rule.keep = keep[b, :, :len_q, :len_k]
        return rule

    def pieces(self, leaves):
        """Dense sub-problems: the whole batch, or each packed sequence. Yields (batch slice,
        rows, tensors, rows being an index of a packed tensor's first dimension)."""
        if not self.case.packed:
            yield slice(0, self.batch), slice(None), dict(leaves)
            return
        begin_q = begin_k = 0
        for b, (len_q, len_k) in enumerate(zip(self.lens_q, self.lens_k, strict=True)):
            rows, keys = slice(begin_q, begin_q + len_q), slice(begin_k, begin_k + len_k)
            part = {"q": leaves["q"][None, rows], "k": leaves["k"][None, keys]}
            part["v"] = leaves["v"][None, keys]
            if "bias" in leaves:
                x = leaves["bias"]
                x = x if x.shape[0] == 1 else x[b : b + 1]
                x = x if x.shape[2] == 1 else x[:, :, :len_q]
                part["bias"] = x if x.shape[3] == 1 else x[..., :len_k]
            if "slopes" in leaves:
                x = leaves["slopes"]
                part["slopes"] = x if x.dim() == 1 else x[b : b + 1]
            if "sinks" in leaves:
                part["sinks"] = leaves["sinks"]
            yield slice(b, b + 1), rows, part
            begin_q, begin_k = begin_q + len_q, begin_k + len_k

    def oracle(self, dtype, keep=None, attend=oracle.attend):
        """The oracle's out, lse and gradients by name, evaluated in `dtype`."""
        leaves = {
            name: x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x
            for name, x in self.leaves.items()
        }
        out = torch.zeros(self.dout.shape, dtype=dtype, device=self.device)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        lse = torch.full(self.lse_shape(), float("-inf"), dtype=statistics, device=self.device)
        for batch, rows, part in self.pieces(leaves):
            piece_out, piece_lse = attend(self.rule(batch, keep), **part)
            if not self.case.packed:
                out, lse = piece_out, piece_lse
            elif rows.stop > rows.start:
                out = torch.cat([out[: rows.start], piece_out[0], out[rows.stop :]])
                lse = torch.cat([lse[:, : rows.start], piece_lse[0], lse[:, rows.stop :]], 1)
        return {"out": out.detach(), "lse": lse.detach()} | self.gradients(out, lse, leaves)

    def keep(self, backend=None):
        """(batch, heads, seqlen_q, seqlen_k) bool: what survives this problem's dropout."""
        if not self.case.dropout:
            return None
        with torch.no_grad():
            signed = self.call(backend, return_attn_probs=True)[2]
        return ~torch.signbit(signed)


def raw_forward(q, k, v, scale=1.0, window=(-1, -1), dropout_p=0.0, philox=None):
    """The registered operator itself, with nothing but what is named."""
    options = (scale, 0.0, dropout_p, *window, 0, 0, False, 0)
    return torch.ops.flash_attn.forward(q, k, v, *(None,) * 16, philox, *options)


def assert_copies(found, exact):
    """The value of a single visible key, to the bit."""
    assert torch.equal(found, exact)


def worst(ours, truth):
    """(largest absolute error, its index). Equal infinities have no error, a NaN of ours an
    infinite one."""
    if truth.numel() == 0:
        return 0.0, ()
    a, b = ours.detach().double(), truth.detach().double()
    error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    flat = int(error.argmax())
    return float(error.flatten()[flat]), tuple(
        int(x) for x in torch.unravel_index(torch.tensor(flat), error.shape)
    )


def compare(found, case=""):
    """The tolerance rule: error against fp64 <= 2 x the low-precision reference's + 1e-5, in fp64
    1e-9 x (1 + max). `found`: by name a list of draws (ours, truth, the references' errors)."""
    for name, draws in found.items():
        errors = [worst(ours, truth) for ours, truth, _ in draws]
        error, where = max(errors)
        if draws[0][0].dtype == torch.float64:
            finite = torch.cat([truth.detach()[truth.isfinite()] for _, truth, _ in draws])
            limit = 1e-9 * (1 + float(finite.abs().max()) if finite.numel() else 1)
        else:
            limit = 2 * max(max(references) for *_, references in draws) + 1e-5
        if not error <= limit:
            draw = max(range(len(draws)), key=lambda n: errors[n][0])
            ours, truth = (x[where].item() for x in draws[draw][:2])
            raise AssertionError(
                f"{name}: error {error:.3g} > {limit:.3g} at {where}: ours {ours:.6g}, "
                f"exact {truth:.6g}; case {case}, draw {draw}"
            )


SMALL = 64  # tensors of at most this many elements are judged over four draws


def check(case, device="cpu", backend=None, gradients=True, seed=0, problem=None):
    """Runs a case through the library and through the oracle, and compares everything. A
    `problem` with values of its own is judged over one draw."""
    gradients = gradients and has_backward(device, case.head_dim, case.dim_v)
    found, draws = {}, 4 if problem is None else 1
    for draw in range(draws):
        problem = Problem(case, device, seed + draw) if draws > 1 else problem
        ours = problem.ours(backend, gradients)
        keep = problem.keep(backend)
        truth = problem.oracle(torch.float64, keep)
        check_kinds(problem, ours, truth)
        references = []
        if case.dtype != "fp64":
            references.append(problem.oracle(case.torch_dtype, keep))
            if gradients and case.heads_k:
                references.append(problem.oracle(case.torch_dtype, keep, oracle.attend_written_out))
        for name, x in ours.items():
            if draw == 0 or x.numel() <= SMALL:
                rounded = truth[name].to(x.dtype)  # fp32 slopes have an fp32 gradient in fp64 too
                errors = [worst(r[name], truth[name])[0] for r in references]
                errors.append(worst(rounded, truth[name])[0])
                found.setdefault(name, []).append((x, truth[name], errors))
        if all(x.numel() > SMALL for x in ours.values()):
            break
    compare(found, case.id)


def check_kinds(problem, ours, truth):
    """Shapes and dtypes as the specification says."""
    dtype = problem.case.torch_dtype
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    assert ours["out"].dtype == dtype and ours["lse"].dtype == statistics
    for name, x in ours.items():
        assert x.shape == truth[name].shape, (name, x.shape, truth[name].shape)
        if name[0] == "d":
            assert x.dtype == problem.leaves[name[1:]].dtype, name
