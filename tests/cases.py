# SPDX-License-Identifier: BSD-3-Clause
"""The cases that the parity tests run: chosen, not crossed. A Case is data; problem.py makes
tensors of it.

REGULAR    round sizes, every dtype: the everyday call.
IRREGULAR  lengths, head dims and head counts around tile and vector borders.
FEATURES   every pair of feature values occurs in at least one case (`pairwise`).
CORNERS    empty, single, fully masked, unequal.
PAIRS      for a GPU, where kernels are many: pairs of features again, over every head_dim bucket;
           PLAIN_PAIRS for the kernels without score features, GENERAL_PAIRS for those with them.
"""

import itertools
import random
from dataclasses import dataclass, fields, replace

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Case:
    batch: int = 2
    seqlen_q: int = 64
    seqlen_k: int = 64
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "fp32"
    packed: bool = False  # varlen: ragged lengths up to seqlen_q and seqlen_k, some of them 0
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    slopes: str = ""  # "", "heads", "batch"
    bias: str = ""  # the dimensions it has: "full", "row", "column", "head", "one"; "mask" is bool
    bias_fp32: bool = False
    sinks: bool = False
    dropout: float = 0.0
    blocks: tuple = ()  # (block_q, block_k)
    bits: bool = False  # some of the blocks are partly visible
    lse_grad: bool = False
    deterministic: bool = False
    scale: float | None = None
    contiguous: bool = False
    aligned: bool = False  # if not contiguous: poison(aligned=True)

    @property
    def dim_v(self):
        return self.head_dim_v or self.head_dim

    @property
    def torch_dtype(self):
        return DTYPES[self.dtype]

    @property
    def id(self):
        """Sizes first, then what differs from the default."""
        name = f"{self.dtype}-b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}"
        name += f"-h{self.heads}.{self.heads_k}-d{self.head_dim}.{self.dim_v}"
        sizes = {
            "batch",
            "seqlen_q",
            "seqlen_k",
            "heads",
            "heads_k",
            "head_dim",
            "head_dim_v",
            "dtype",
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in sizes or value == field.default:
                continue
            if isinstance(value, tuple):
                value = ".".join(map(str, value))
            name += f"-{field.name}" if value is True else f"-{field.name}{value}"
        return name


def pairwise(axes: dict, seed: int = 0) -> list[dict]:
    """Rows that hold every pair of values of every two axes at least once. Greedy: each row is
    the best of a few random completions of the first pair that is still missing."""
    rng = random.Random(seed)
    names = list(axes)
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]
    }
    order = sorted(missing, key=repr)
    rows = []
    while missing:
        a, x, b, y = next(pair for pair in order if pair in missing)
        best, gain = None, -1
        for _ in range(40):
            row = {name: rng.choice(axes[name]) for name in names} | {a: x, b: y}
            covered = sum(pair in missing for pair in pairs_of(row, names))
            if covered > gain:
                best, gain = row, covered
        missing.difference_update(pairs_of(best, names))
        rows.append(best)
    return rows


def pairs_of(row, names):
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}


def _with_lengths(row):
    row = dict(row)
    row["seqlen_q"], row["seqlen_k"] = row.pop("lengths")
    row["heads"], row["heads_k"] = row.pop("head_counts")
    row["head_dim"], row["head_dim_v"] = row.pop("dims")
    row["causal"], row["window"] = row.pop("mask")
    row["blocks"], row["bits"] = row.pop("blocks")
    return Case(**row)


REGULAR = [
    Case(seqlen_q=s, seqlen_k=s, head_dim=d, dtype=dtype, causal=causal, contiguous=contiguous)
    for s, d, dtype, causal, contiguous in [
        (128, 64, "fp32", False, True),
        (128, 64, "bf16", True, True),
        (128, 64, "fp16", False, False),
        (128, 64, "fp64", True, False),
        (256, 128, "fp32", True, False),
        (256, 128, "bf16", False, False),
        (256, 128, "fp16", True, True),
        (192, 32, "bf16", True, False),
        (192, 96, "fp32", False, False),
        (256, 256, "bf16", True, False),
    ]
]

LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257, 704)

IRREGULAR = (
    # Every length on both sides, met with another one each time; the dtype and the mask go round.
    [
        Case(
            batch=1,
            seqlen_q=q,
            seqlen_k=LENGTHS[(index * 5 + 3) % len(LENGTHS)],
            heads=2,
            heads_k=1,
            head_dim=32,
            dtype=("fp32", "bf16", "fp16", "fp64")[index % 4],
            causal=index % 2 == 0,
        )
        for index, q in enumerate(LENGTHS)
    ]
    + [
        Case(batch=1, seqlen_q=70, seqlen_k=45, head_dim=d, head_dim_v=dv, dtype=dtype, causal=True)
        for d, dv, dtype in [
            (1, 1, "fp32"),
            (4, 4, "bf16"),
            (7, 12, "fp32"),
            (12, 7, "bf16"),
            (46, 46, "fp16"),
            (59, 100, "fp32"),
            (80, 8, "bf16"),
            (128, 40, "fp32"),
            (192, 128, "bf16"),
            (320, 512, "fp32"),
        ]
    ]
    + [
        Case(seqlen_q=50, seqlen_k=66, heads=h, heads_k=hk, head_dim=16, dtype=dtype, causal=True)
        for h, hk, dtype in [
            (1, 1, "bf16"),
            (8, 2, "fp32"),
            (12, 3, "bf16"),
            (21, 7, "fp32"),
            (40, 1, "fp16"),
        ]
    ]
)

_FEATURE_AXES = {
    "dtype": ["fp32", "bf16", "fp16", "fp64"],
    "packed": [False, True],
    "lengths": [(64, 64), (33, 97), (97, 33), (1, 65)],
    "head_counts": [(4, 4), (4, 2), (6, 1)],
    "dims": [(64, 0), (32, 0), (40, 24), (7, 12), (128, 64)],
    "mask": [
        (False, (-1, -1)),
        (True, (-1, -1)),
        (False, (20, 7)),
        (True, (16, -1)),
        (False, (-1, 3)),
    ],
    "softcap": [0.0, 2.0],
    "slopes": ["", "heads", "batch"],
    "bias": ["", "full", "row", "column", "head", "one", "mask"],
    "bias_fp32": [False, True],
    "sinks": [False, True],
    "dropout": [0.0, 0.25],
    "blocks": [((), False), ((16, 16), False), ((32, 16), True)],  # and whether cut by bits
    "lse_grad": [False, True],
    "deterministic": [False, True],
    "scale": [None, 0.3],
    "contiguous": [False, True],
}

FEATURES = [_with_lengths(row) for row in pairwise(_FEATURE_AXES)]

CORNERS = [
    Case(batch=0),
    Case(seqlen_q=0),
    Case(seqlen_k=0),
    Case(seqlen_k=0, causal=True, sinks=True, lse_grad=True),
    Case(heads=0, heads_k=0),
    Case(batch=1, seqlen_q=1, seqlen_k=1, heads=1, heads_k=1, head_dim=16, dtype="fp16"),
    Case(batch=1, seqlen_q=1, seqlen_k=1, heads=1, heads_k=1, head_dim=1, dtype="bf16"),
    Case(window=(0, 0)),
    Case(window=(0, 0), seqlen_q=40, seqlen_k=30, dtype="bf16"),
    Case(seqlen_q=90, seqlen_k=20, causal=True, dtype="bf16", lse_grad=True),
    Case(seqlen_q=90, seqlen_k=20, causal=True, sinks=True, lse_grad=True),
    Case(seqlen_q=129, seqlen_k=50, window=(32, 64)),
    Case(seqlen_q=5, seqlen_k=300, window=(3, -1), dtype="bf16"),
    Case(seqlen_q=300, seqlen_k=5, window=(-1, 3), dtype="bf16"),
    Case(scale=0.0),
    Case(scale=-0.7, causal=True, softcap=3.0),
    Case(packed=True, seqlen_q=1, seqlen_k=90, dtype="bf16", causal=True),
    Case(packed=True, seqlen_q=90, seqlen_k=1, causal=True, sinks=True),
    Case(packed=True, seqlen_q=0, seqlen_k=30),
    Case(packed=True, seqlen_q=30, seqlen_k=0, sinks=True),
    Case(bias="mask", seqlen_q=30, seqlen_k=3, dtype="bf16", lse_grad=True),
    Case(slopes="batch", seqlen_q=17, seqlen_k=70),
    Case(dropout=0.9, causal=True),
    Case(blocks=(64, 64), seqlen_q=100, seqlen_k=200, causal=True, dtype="bf16"),
    Case(blocks=(1, 1), seqlen_q=20, seqlen_k=30),
    Case(blocks=(128, 8), seqlen_q=100, seqlen_k=30, heads_k=4),
    Case(blocks=(64, 64), bits=True, seqlen_q=100, seqlen_k=200, causal=True, dtype="bf16"),
    Case(blocks=(24, 40), bits=True, packed=True, sinks=True, lse_grad=True),
]

ALL = REGULAR + IRREGULAR + FEATURES + CORNERS

_MASKS = [
    (False, (-1, -1)),
    (True, (-1, -1)),
    (False, (20, 7)),
    (True, (70, -1)),
    (False, (-1, 3)),
    (False, (140, -1)),
]

_BLOCKS = [
    ((), False),
    ((64, 64), False),
    ((64, 64), True),
    ((128, 128), True),
    ((128, 64), False),
    ((48, 40), True),
]

# Lengths beside tile edges; few queries and many keys, which are split; more queries than keys.
_PLAIN_AXES = {
    "dtype": ["bf16", "fp16", "fp32"],
    "dims": [
        (64, 0),
        (128, 0),
        (1, 0),
        (3, 5),
        (40, 0),
        (80, 0),
        (96, 0),
        (160, 0),
        (192, 128),
        (64, 128),
        (256, 0),
        (320, 0),
        (512, 0),
    ],
    "lengths": [
        (64, 64),
        (128, 256),
        (65, 129),
        (127, 63),
        (1, 257),
        (2, 1),
        (255, 127),
        (3, 1500),
        (200, 333),
        (300, 40),
    ],
    "head_counts": [(4, 4), (4, 1), (8, 1), (8, 2), (6, 3)],
    "mask": _MASKS,
    "packed": [False, True],
    "blocks": _BLOCKS,
    "sinks": [False, True],
    "lse_grad": [False, True],
    "deterministic": [False, True],
    "scale": [None, 0.3],  # 0 and below go to the kernels with score features
    "contiguous": [False, True],
}

_GENERAL_AXES = {
    "dtype": ["bf16", "fp16", "fp32"],
    "dims": [(64, 0), (128, 0), (33, 0), (192, 128), (64, 128), (256, 0), (512, 0)],
    "lengths": [(64, 128), (129, 65), (1, 257), (3, 1500), (200, 333)],
    "head_counts": [(4, 4), (8, 1), (8, 2)],
    "mask": _MASKS[:5],
    "packed": [False, True],
    "softcap": [0.0, 2.0],
    "slopes": ["", "heads", "batch"],
    "bias": ["", "full", "row", "column", "head", "one", "mask"],
    "bias_fp32": [False, True],
    "sinks": [False, True],
    "dropout": [0.0, 0.25],
    "blocks": _BLOCKS,
    "lse_grad": [False, True],
    "deterministic": [False, True],
    "scale": [None, -0.4, 0.0],
    "contiguous": [False, True],
}

PLAIN_PAIRS = [_with_lengths(row) for row in pairwise(_PLAIN_AXES)]
GENERAL_PAIRS = [_with_lengths(row) for row in pairwise(_GENERAL_AXES)]
PAIRS = PLAIN_PAIRS + GENERAL_PAIRS


def forward_only(cases):
    """The same without what only a gradient can show."""
    return list(dict.fromkeys(replace(c, lse_grad=False, deterministic=False) for c in cases))


def ids(case):
    return case.id if isinstance(case, Case) else None
