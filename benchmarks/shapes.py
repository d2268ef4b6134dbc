# SPDX-License-Identifier: BSD-3-Clause
"""Shapes that the benchmarks share. One place, so that two tables can be compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One self-attention problem; lengths in tokens, dims in elements."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def forward_flops(self) -> float:
        """4 * batch * heads * seqlen^2 * head_dim, half of it under causal."""
        full = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full / 2 if self.causal else full

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"b{self.batch} h{self.heads} s{self.seqlen} d{self.head_dim} {mask}"


def cpu_shapes() -> list[Shape]:
    """Head_dim 64 and 128, 512 to 8,192 tokens, causal and not; 8 heads, 2 at 8,192."""
    return [
        Shape(1, seqlen, 2 if seqlen == 8192 else 8, head_dim, causal)
        for head_dim in (64, 128)
        for seqlen in (512, 1024, 2048, 4096, 8192)
        for causal in (False, True)
    ]
