# SPDX-License-Identifier: BSD-3-Clause
"""Shapes that the benchmarks share, and how their work is counted. One place, so that two tables
can be compared.
"""

from dataclasses import dataclass, replace

import torch

BLOCK = 128  # queries and keys of one block of a block mask
DENSITIES = (1.0, 0.507, 0.26, 0.134, 0.071)


@dataclass(frozen=True)
class Shape:
    """One attention problem; lengths in tokens, dims in elements."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool = False
    seqlen_k: int = 0  # 0: seqlen
    heads_k: int = 0  # 0: heads
    dropout: float = 0.0
    density: float | None = None  # of a block mask; None: there is none

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen

    @property
    def key_heads(self) -> int:
        return self.heads_k or self.heads

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head; causal: the area under the diagonal, S * S / 2.

        The diagonal ends bottom right. Of a block mask: its share of the whole.
        """
        whole = float(self.seqlen * self.keys)
        if self.causal:
            whole -= min(self.seqlen, self.keys) ** 2 / 2
            whole -= max(0, self.seqlen - self.keys) * self.keys  # rows that see nothing
        return whole * (1.0 if self.density is None else self.density)

    def flops(self, op: str) -> float:
        """4 * batch * heads * pairs * head_dim forward, 2.5 times that backward."""
        forward = 4.0 * self.batch * self.heads * self.pairs * self.head_dim
        return forward * {"fwd": 1.0, "decode": 1.0, "bwd": 2.5, "fwd_bwd": 3.5}[op]

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of k and v."""
        return 2 * self.batch * self.keys * self.key_heads * self.head_dim * itemsize

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.heads_k}" if self.heads_k else f"{self.heads}"
        length = f"{self.seqlen}/{self.seqlen_k}" if self.seqlen_k else f"{self.seqlen}"
        name = f"b{self.batch} h{heads} s{length} d{self.head_dim} "
        name += "causal" if self.causal else "full"
        name += f" p{self.dropout:g}" if self.dropout else ""
        return name + ("" if self.density is None else f" density {self.density:g}")


def paper() -> list[Shape]:
    """The FlashAttention papers' sweep: 16k tokens, heads * head_dim = 2048; 36 points."""
    return [
        Shape(16384 // seqlen, seqlen, 2048 // head_dim, head_dim, causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def gpt2() -> list[Shape]:
    """Attention of GPT-2 medium as in the first paper's title figure, without and with dropout."""
    shape = Shape(64, 1024, 16, 64, True)
    return [shape, replace(shape, dropout=0.1)]


def cpu() -> list[Shape]:
    """Head_dim 64 and 128, 512 to 8,192 tokens, causal and not; 8 heads, 2 at 8,192."""
    return [
        Shape(1, seqlen, 2 if seqlen == 8192 else 8, head_dim, causal)
        for head_dim in (64, 128)
        for seqlen in (512, 1024, 2048, 4096, 8192)
        for causal in (False, True)
    ]


def tiny() -> list[Shape]:
    """Seconds anywhere: to see that everything runs."""
    return [Shape(2, 128, 4, 32, causal) for causal in (False, True)]


SETS = {"paper": paper, "gpt2": gpt2, "cpu": cpu, "tiny": tiny}
DTYPES = {"paper": "bfloat16", "gpt2": "float16", "cpu": "float32,bfloat16", "tiny": "float32"}


def decode(cuda: bool) -> list[Shape]:
    """A few queries against a long cache: 1, 4 and 16 rows on a GPU, 1 on the CPU."""
    if not cuda:
        return [
            Shape(1, 1, 32, 128, seqlen_k=4096, heads_k=8),
            Shape(1, 1, 8, 64, seqlen_k=4096),
        ]
    sizes = [
        (1, 32, 0, 4096),
        (1, 32, 8, 8192),
        (1, 32, 8, 65536),
        (16, 32, 8, 8192),
        (64, 32, 8, 8192),
        (1, 64, 8, 131072),
    ]
    return [
        Shape(batch, rows, heads, 128, seqlen_k=keys, heads_k=heads_k)
        for batch, heads, heads_k, keys in sizes
        for rows in (1, 4, 16)
    ]


def sparse(cuda: bool) -> list[Shape]:
    """Random blocks with the diagonal, each head_dim first without a block mask."""
    seqlen, heads = (16384, 16) if cuda else (2048, 2)
    return [
        Shape(1, seqlen, heads, head_dim, density=density)
        for head_dim in (64, 128)
        for density in (None, *DENSITIES)
    ]


def features(cuda: bool) -> list[Shape]:
    """Where each feature is compared with the plain call."""
    if not cuda:
        return [Shape(1, 1024, 4, 64)]
    return [Shape(4, 4096, 2048 // head_dim, head_dim) for head_dim in (64, 128)]


def memory(cuda: bool) -> list[Shape]:
    """Lengths whose peak memory shows whether it is linear."""
    heads, causal = (16, False) if cuda else (1, True)
    return [Shape(1, seqlen, heads, 64, causal) for seqlen in (16384, 32768, 65536)]


def visible_blocks(shape: Shape) -> torch.Tensor | None:
    """(rows, columns) bool: the diagonal and random blocks, `density` of them all; same each time.

    None for a shape without a block mask.
    """
    if shape.density is None:
        return None
    rows, columns = -(-shape.seqlen // BLOCK), -(-shape.keys // BLOCK)
    order = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
    order.fill_diagonal_(-1.0)
    chosen = max(1, round(shape.density * rows * columns))
    return order <= order.flatten().kthvalue(chosen).values
