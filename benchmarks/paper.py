# SPDX-License-Identifier: BSD-3-Clause
"""The first FlashAttention paper's tables (https://arxiv.org/abs/2205.14135), each a command:

    flash-attn bench paper               # all of them; or python benchmarks/paper.py
    flash-attn bench paper gpt2 bert     # these
    flash-attn bench paper memory --out figures

attention  GPT-2 medium's attention alone (its figure 1): time and memory, without and with dropout
io         the same problem: bytes moved in device memory (its figure 2; needs ncu)
gpt2       training GPT-2 small through Hugging Face, 1,024 and 4,096 tokens (its table 2)
context    GPT-2 small, 4,096 tokens with ours against 1,024 with eager (its table 4)
bert       training BERT-large through Hugging Face, 512 tokens (its table 1)
memory     peak memory against length, to 65,536 tokens (its figure 3, right; table 21)
sparse     butterfly block-sparse against dense, to 65,536 tokens (its figure 3, left; tables 9 on)

Each prints a table and writes DIR/TABLE.csv (a row as soon as it is known) and a picture
DIR/TABLE.png (matplotlib). A point that fails is a row with a note, one that cannot run here a row
that says what it needs. Training is also compared with eager attention from another seed: ours
fails where its losses are further from eager's than that one's. Without a GPU, or with --small,
sizes that take seconds. Exits with 1 if ours failed anywhere.
"""

import argparse
import csv
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paper_attention
import paper_training
import torch
from bench import machine_of, say
from implementations import IMPLEMENTATIONS
from paper_attention import Setting

Rows = list[dict[str, object]]


@dataclass
class Table:
    """One of the tables.

    Attributes:
        make: yields its rows; one of them: column -> value, "impl" among them, and "note" where
            it failed or "needs" where it cannot run here.
        picture: (x, y, logarithmic): a line an implementation; or bars where x is "".
    """

    make: Callable[[Setting], Rows]
    picture: tuple[str, str, bool]
    losses: bool = False  # rows carry "losses", drawn on their own


TABLES = {
    "attention": Table(paper_attention.attention, ("", "fwd_bwd_ms", False)),
    "io": Table(paper_attention.traffic, ("", "GB", False)),
    "gpt2": Table(paper_training.gpt2, ("", "ms", False), True),
    "context": Table(paper_training.context, ("", "ms", False), True),
    "bert": Table(paper_training.bert, ("", "ms", False), True),
    "memory": Table(paper_attention.memory, ("seqlen", "MiB", True)),
    "sparse": Table(paper_attention.sparse, ("seqlen", "fwd_bwd_ms", True)),
}


def text_of(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def show(rows: Rows) -> str:
    """An aligned table; "losses" are for the picture."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "losses"))
    cells = [names, *([text_of(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def write_csv(path: Path, rows: Rows) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            losses = row.get("losses")
            text = {"losses": " ".join(f"{x:.5f}" for x in losses)} if losses else {}
            writer.writerow(row | text)


def draw(path: Path, title: str, table: Table, rows: Rows) -> str:
    """Where the picture is, or why there is none."""
    x, y, logarithmic = table.picture
    drawn = [row for row in rows if isinstance(row.get(y), float)]
    if not drawn:
        return "no picture: nothing was measured"
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    figure, axes = pyplot.subplots(
        1, 2 if table.losses else 1, figsize=(11 if table.losses else 6, 4), squeeze=False
    )
    axis = axes[0][0]
    if x:
        for impl in dict.fromkeys(row["impl"] for row in drawn):
            own = [row for row in drawn if row["impl"] == impl]
            axis.plot([r[x] for r in own], [r[y] for r in own], marker="o", label=impl)
        axis.set_xlabel(x)
        axis.legend()
    else:
        labels = [f"{row.get('case', '')}\n{row['impl']}".strip() for row in drawn]
        axis.bar(range(len(drawn)), [row[y] for row in drawn])
        axis.set_xticks(range(len(drawn)), labels, rotation=45, ha="right", fontsize=8)
    if logarithmic:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    for row in rows if table.losses else []:
        if row.get("losses"):
            axes[0][1].plot(row["losses"], label=f"{row['case']} {row['impl']}", linewidth=1)
            axes[0][1].set(xlabel="step", ylabel="loss")
            axes[0][1].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return str(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="flash-attn bench paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="*", metavar="table", help=", ".join(TABLES))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--impl", default="eager,sdpa,ours", help="default: eager,sdpa,ours")
    parser.add_argument("--steps", type=int, help="of training (200; small: 8)")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the models (0)")
    parser.add_argument("--small", action="store_true", help="small sizes, also on a GPU")
    parser.add_argument("--out", default="paper", help="where tables and pictures go (paper/)")
    options = parser.parse_args(arguments)
    cuda = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda: torch sees no GPU")
    options.device = "cuda" if cuda else "cpu"
    options.small = options.small or not cuda
    options.steps = (8 if options.small else 200) if options.steps is None else options.steps
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.impl = [name for name in options.impl.split(",") if name]
    for name in options.impl:
        if name not in IMPLEMENTATIONS:
            parser.error(f"--impl: {name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    for name in options.tables:
        if name not in TABLES:
            parser.error(f"{name!r} is not one of {', '.join(TABLES)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.simplefilter("ignore", UserWarning)
    setting = Setting(
        options.device, options.small, tuple(options.impl), options.steps, options.dropout
    )
    machine = ", ".join(f"{k} {v}" for k, v in machine_of(torch.device(options.device)).items())
    say(machine)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.tables or TABLES:
        table = TABLES[name]
        title = (table.make.__doc__ or "").partition("\n")[0]
        say(f"\n{name}: {title}")
        rows: Rows = []
        for row in table.make(setting):
            rows.append(row)
            write_csv(out / f"{name}.csv", rows)
        say(show(rows))
        write_csv(out / f"{name}.csv", rows)  # later rows may have completed earlier ones
        say(draw(out / f"{name}.png", f"{name}; {machine}", table, rows))
        failed |= any(row.get("note") and str(row["impl"]).startswith("ours") for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
