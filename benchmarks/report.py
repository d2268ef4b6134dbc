# SPDX-License-Identifier: BSD-3-Clause
"""Rows of results: as a table on the terminal, CSV, JSON and a picture, beside recorded figures."""

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from shapes import SETS

RECORDED = Path(__file__).with_name("peers_h200.csv")
PEERS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "eager", "flex", "fa3", "fa4")

# Nominal dense 16-bit TFLOP/s and GB/s of memory. The longest name that the device's contains.
LIMITS = {
    "H200": (990, 4800),
    "H100": (990, 3350),
    "GH200": (990, 4000),
    "H20": (148, 4000),
    "B200": (2250, 8000),
    "A100": (312, 2039),
    "A10": (125, 600),
    "A40": (150, 696),
    "L4": (121, 300),
    "L40S": (362, 864),
    "T4": (65, 320),
    "RTX 3090": (71, 936),
    "RTX 4090": (165, 1008),
    "RTX 5090": (209, 1792),
}


@dataclass
class Row:
    """One implementation at one point. Times in ms; what was not measured is None."""

    group: str  # the set of shapes; or features, sparse, decode, memory
    op: str
    shape: str
    dtype: str
    impl: str
    head_dim: int
    seqlen: int
    causal: bool
    feature: str = "plain"
    ms: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    share: float | None = None  # of the machine's limit, in compute or (decode) in bandwidth
    peak_mib: float | None = None  # beyond the inputs
    error: float | None = None
    spread: float | None = None
    rounds: int | None = None
    how: str = ""
    setup: float | None = None  # seconds from the first call to the check
    note: str = ""  # why there is no time

    @property
    def point(self) -> tuple[str, str, str, str]:
        return self.op, self.shape, self.dtype, self.feature


def limits_of(device: str) -> tuple[float | None, float | None]:
    """(TFLOP/s, GB/s) of a device, None where they are not known."""
    names = [name for name in LIMITS if name in device]
    return LIMITS[max(names, key=len)] if names else (None, None)


@cache
def recorded(device: str) -> dict[tuple[str, str, str, str], dict[str, float]]:
    """(op, shape, dtype, unit) -> peer -> figure, recorded on such a device; empty for others."""
    found = {}
    with RECORDED.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["device"] != device:
                continue
            key = line["op"], line["shape"], line["dtype"], line["unit"]
            found[key] = {peer: float(line[peer]) for peer in PEERS if line[peer]}
    return found


def recorded_of(row: Row, device: str, unit: str = "TFLOP/s") -> dict[str, float]:
    return recorded(device).get((row.op, row.shape, row.dtype, unit), {})


def stars(rows: dict[str, Row], device: str, unit: str) -> str:
    """The recorded figures of peers that are not among a point's rows, each with a star."""
    figures = recorded_of(next(iter(rows.values())), device, unit) if rows else {}
    name = "" if unit == "TFLOP/s" else f" {unit}"
    return "".join(f"  {p}* {figures[p]:g}{name}" for p in figures if p not in rows)


def best_over_cudnn(row: Row, device: str) -> float | None:
    """Best recorded peer over cuDNN of the same run: what ours over a live cuDNN is held against.

    Clocks differ from run to run, so two figures of one run are compared with two of another.
    """
    peers = recorded_of(row, device)
    return max(peers.values()) / peers["sdpa_cudnn"] if "sdpa_cudnn" in peers else None


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


# ---- points and their comparisons


def by_point(rows: Iterable[Row]) -> dict[tuple, dict[str, Row]]:
    """Rows of each point by implementation, in their order."""
    points: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        points.setdefault(row.point, {})[row.impl] = row
    return points


def faster(rows: dict[str, Row], peer: str) -> float | None:
    """How many times as fast as the peer ours was in the same run."""
    ours, theirs = rows.get("ours"), rows.get(peer)
    if ours is None or theirs is None or not ours.ms or not theirs.ms:
        return None
    return theirs.ms / ours.ms


def comparisons(rows: dict[str, Row], device: str) -> dict[str, float]:
    """Ours against each live peer and, if cuDNN ran too, against the best recorded one ("best")."""
    found = {peer: faster(rows, peer) for peer in rows if peer != "ours"}
    result = {peer: ratio for peer, ratio in found.items() if ratio is not None}
    if "sdpa_cudnn" in result:
        best = best_over_cudnn(rows["sdpa_cudnn"], device)
        if best is not None:
            result["best"] = result["sdpa_cudnn"] / best
    return result


def speed_line(rows: dict[str, Row], device: str, unit: str) -> str:
    """One point: each implementation's time and rate, recorded peers (*), then the comparisons."""
    first = next(iter(rows.values()))
    line = f"{first.shape:<28}"
    for row in rows.values():
        if row.ms is None:
            line += f"  {row.impl} -"
            continue
        rate = row.tflops * (1e3 if unit == "GFLOP/s" else 1)
        line += f"  {row.impl} {row.ms:.3f} ms {rate:.0f}"
        line += f" {row.share:.0%}" if row.share is not None else ""
    line += stars(rows, device, "TFLOP/s") + stars(rows, device, "ms")
    ratios = comparisons(rows, device)
    if ratios:
        line += "  |  " + "  ".join(f"/{peer} {ratio:.2f}" for peer, ratio in ratios.items())
    return line


def notes(rows: Iterable[Row]) -> list[str]:
    """Why points have no time, each reason once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            where = found.setdefault(f"{row.impl}: {row.note}", [])
            where.append(f"{row.op} {row.shape}")
    return [
        f"{what} ({where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"
        for what, where in found.items()
    ]


def summary(rows: list[Row], device: str) -> list[str]:
    """Geometric mean and least of ours against each peer, by op, set of shapes and dtype."""
    lines = []
    groups: dict[tuple[str, str, str], dict[str, dict[str, float]]] = {}
    for point in by_point(rows).values():
        row = next(iter(point.values()))
        ratios = groups.setdefault((row.op, row.group, row.dtype), {})
        ratios[row.shape] = comparisons(point, device)
    for group, points in groups.items():
        for peer in dict.fromkeys(peer for ratios in points.values() for peer in ratios):
            ratios = {shape: found[peer] for shape, found in points.items() if peer in found}
            least = min(ratios, key=ratios.get)
            mean = geometric_mean(ratios.values())
            lines.append(
                f"{' '.join(group)}: ours over {peer}: geometric mean {mean:.3f}, least "
                f"{ratios[least]:.3f} ({least}), {len(ratios)} points"
            )
    return lines


def markdown(rows: list[Row], device: str) -> str:
    """Tables of ours: a line for each head_dim and mask, a column for each seqlen.

    A cell is TFLOP/s, then ours over each live peer, then over the best recorded one.
    """
    tables: dict[tuple[str, str, str], dict[str, dict[int, str]]] = {}
    legends: dict[tuple[str, str, str], list[str]] = {}
    for point in by_point(row for row in rows if row.group in SETS).values():
        ours = point.get("ours")
        if ours is None or not ours.tflops or " p0" in ours.shape:
            continue
        key = ours.op, ours.group, ours.dtype
        ratios = comparisons(point, device)
        legends[key] = ["TFLOP/s", *(f"over {peer}" for peer in ratios)]
        figure = f"{ours.tflops:.0f}" if ours.tflops >= 10 else f"{ours.tflops:.3f}"
        label = f"d{ours.head_dim} {'causal' if ours.causal else 'full'}"
        cell = " / ".join([figure, *(f"{ratio:.2f}" for ratio in ratios.values())])
        tables.setdefault(key, {}).setdefault(label, {})[ours.seqlen] = cell
    text = ""
    for key, lines in tables.items():
        columns = sorted({seqlen for cells in lines.values() for seqlen in cells})
        text += f"{' '.join(key)}: {' / '.join(legends[key])}\n\n"
        text += "| | " + " | ".join(f"{seqlen:,}" for seqlen in columns) + " |\n"
        text += "|---" * (1 + len(columns)) + "|\n"
        for label, cells in lines.items():
            text += f"| {label} | " + " | ".join(cells.get(s, "") for s in columns) + " |\n"
        text += "\n"
    return text


# ---- files


def write_csv(path: str, rows: list[Row]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def write_json(path: str, rows: list[Row], machine: dict[str, str]) -> None:
    Path(path).write_text(
        json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )


def read_json(path: str) -> tuple[list[Row], dict[str, str]]:
    found = json.loads(Path(path).read_text())
    return [Row(**row) for row in found["rows"]], found["machine"]


def picture(path: str, rows: list[Row], machine: dict[str, str]) -> str:
    """Draws TFLOP/s against seqlen, a panel for each op, dtype, head_dim and mask of the first set
    of shapes; '' or why not.

    Peers that did not run are drawn dashed where figures are recorded for this device.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    drawn = [row for row in rows if row.group in SETS and row.tflops]
    drawn = [row for row in drawn if row.group == drawn[0].group]
    if not drawn:
        return "no picture: there is no speed to draw"
    ops = list(dict.fromkeys(row.op for row in drawn))
    panels = sorted({(row.dtype, row.head_dim, row.causal) for row in drawn})
    figure, axes = pyplot.subplots(
        len(ops),
        len(panels),
        figsize=(3.4 * len(panels) + 1, 3.2 * len(ops) + 0.8),
        squeeze=False,
        sharex=True,
    )
    for i, op in enumerate(ops):
        for j, (dtype, head_dim, causal) in enumerate(panels):
            key = op, dtype, head_dim, causal
            own = [r for r in drawn if (r.op, r.dtype, r.head_dim, r.causal) == key]
            draw_panel(axes[i][j], own, machine["device"])
            mask = "causal" if causal else "full"
            axes[i][j].set_title(f"{op}, {dtype}, head_dim {head_dim}, {mask}", fontsize=10)
        axes[i][0].set_ylabel("TFLOP/s")
    handles = {}
    for panel in axes.flat:
        handles |= {label: h for h, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=len(handles))
    figure.suptitle(f"{machine['device']}, torch {machine['torch']}, {machine['date']}")
    figure.tight_layout(rect=(0, 0.04 + 0.03 / len(ops), 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return ""


def draw_panel(axis, rows: list[Row], device: str) -> None:
    colours = {name: f"C{i}" for i, name in enumerate(("ours", *PEERS, "sdpa"))}
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        lines.setdefault(row.impl, {})[row.seqlen] = row.tflops
    live = set(lines)
    for row in rows:
        for peer, figure in recorded_of(row, device).items():
            if peer not in live and peer != "sdpa_efficient":
                lines.setdefault(peer, {})[row.seqlen] = figure
    for name, points in lines.items():
        x = sorted(points)
        style = {"linestyle": "-" if name in live else "--", "color": colours[name]}
        label = name if name in live else f"{name} (recorded)"
        axis.plot(x, [points[s] for s in x], marker="o", markersize=3, label=label, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({row.seqlen for row in rows}))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}" if x < 1024 else f"{x / 1024:.0f}k")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
