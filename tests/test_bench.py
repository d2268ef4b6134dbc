# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark program: how work is counted, what is recorded, what a wrong result does; and one
run of it on the CPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

import bench  # noqa: E402
import implementations  # noqa: E402
import report  # noqa: E402
import shapes  # noqa: E402
import timing  # noqa: E402
import workload  # noqa: E402
from report import Row  # noqa: E402
from shapes import Shape  # noqa: E402

H200 = "NVIDIA H200"


def brute_pairs(shape):
    """Visible pairs, the diagonal's own counted half, as S * S / 2 does."""
    i = torch.arange(shape.seqlen)[:, None] + shape.keys - shape.seqlen
    j = torch.arange(shape.keys)
    return (j < i).sum().item() + ((j == i).sum().item()) / 2


@pytest.mark.parametrize("lengths", [(64, 64), (16, 100), (100, 16), (1, 1), (1, 50)])
def test_causal_pairs(lengths):
    shape = Shape(1, lengths[0], 1, 8, True, seqlen_k=lengths[1])
    assert shape.pairs == brute_pairs(shape)


def test_flops_by_hand():
    shape = Shape(2, 512, 4, 64)
    assert shape.flops("fwd") == 4 * 2 * 4 * 512 * 512 * 64
    assert shape.flops("bwd") == 2.5 * shape.flops("fwd")
    assert shape.flops("fwd_bwd") == 3.5 * shape.flops("fwd")
    assert Shape(2, 512, 4, 64, True).flops("fwd") == shape.flops("fwd") / 2
    assert Shape(2, 512, 4, 64, density=0.25).flops("fwd") == shape.flops("fwd") / 4


def test_paper_is_36_points_of_16k_tokens():
    points = shapes.paper()
    assert len({p.name for p in points}) == 36
    assert {p.batch * p.seqlen for p in points} == {16384}
    assert {p.heads * p.head_dim for p in points} == {2048}
    assert {p.head_dim for p in points} == {64, 128, 256}


def test_names_tell_shapes_apart():
    lists = [make() for make in shapes.SETS.values()]
    for make in (shapes.sparse, shapes.decode, shapes.features, shapes.memory):
        lists += [make(False), make(True)]
    for points in lists:
        assert len({shape.name for shape in points}) == len(points) == len(set(points))


@pytest.mark.parametrize("density", shapes.DENSITIES)
def test_visible_blocks_have_the_density_and_the_diagonal(density):
    blocks = shapes.visible_blocks(Shape(1, 16384, 1, 64, density=density))
    assert blocks.shape == (128, 128)
    assert abs(blocks.float().mean().item() - density) < 2e-4
    assert blocks.diagonal().all()
    assert torch.equal(blocks, shapes.visible_blocks(Shape(1, 16384, 1, 64, density=density)))


def test_recorded_figures_cover_what_is_compared():
    """72 points with four peers; the geometric means are those of the whole record."""
    best = {"fwd": [], "bwd": []}
    for shape in shapes.paper():
        for op, ratios in best.items():
            row = Row("paper", op, shape.name, "bfloat16", "ours", 64, 512, False)
            assert {"sdpa_flash", "sdpa_cudnn", "fa3", "fa4"} <= set(report.recorded_of(row, H200))
            ratios.append(report.best_over_cudnn(row, H200))
    assert report.geometric_mean(best["fwd"]) == pytest.approx(1.065, abs=5e-4)
    assert report.geometric_mean(best["bwd"]) == pytest.approx(1.149, abs=5e-4)
    known = report.recorded(H200)
    for shape in shapes.gpt2():
        assert ("fwd_bwd", shape.name, "float16", "ms") in known
    for shape in shapes.sparse(True):
        assert (shape.density is None) != (("bwd", shape.name, "bfloat16", "ms") in known)
    for shape in shapes.decode(True):
        assert ("decode", shape.name, "bfloat16", "us") in known
    for shape in shapes.memory(True):
        assert ("fwd_bwd", shape.name, "bfloat16", "MiB") in known
    assert set(bench.MS_LIMITS) == {shape.name for shape in shapes.gpt2()}
    assert report.recorded("another GPU") == {}


def test_limits_take_the_longest_name():
    assert report.limits_of("NVIDIA L40S") == report.LIMITS["L40S"]
    assert report.limits_of("NVIDIA GH200 480GB") == report.LIMITS["GH200"]
    assert report.limits_of("CPU, 2 threads") == (None, None)


def paper_rows():
    """Two points on an H200: ours twice cuDNN, then as fast."""
    rows = []
    for seqlen, ours in ((512, 0.5), (1024, 1.0)):
        shape = Shape(16384 // seqlen, seqlen, 32, 64)
        for impl, ms in (("ours", ours), ("sdpa_cudnn", 1.0)):
            row = Row("paper", "fwd", shape.name, "bfloat16", impl, 64, seqlen, False)
            row.ms, row.tflops, row.share = ms, shape.flops("fwd") / ms / 1e9, 0.25
            rows.append(row)
    return rows


def test_comparisons_and_summary():
    rows = paper_rows()
    points = list(report.by_point(rows).values())
    assert [report.comparisons(p, H200)["sdpa_cudnn"] for p in points] == [2.0, 1.0]
    best = report.best_over_cudnn(rows[0], H200)
    assert report.comparisons(points[0], H200)["best"] == 2.0 / best
    assert "best" not in report.comparisons(points[0], "another GPU")
    line = report.speed_line(points[0], H200, "TFLOP/s")
    assert "/sdpa_cudnn 2.00" in line and "fa4* 316" in line and "25%" in line
    text = "\n".join(report.summary(rows, H200))
    wanted = "fwd paper bfloat16: ours over sdpa_cudnn: geometric mean 1.414, least 1.000 (b16 h32"
    assert wanted in text


def test_markdown():
    assert report.markdown(paper_rows(), H200).splitlines() == [
        "fwd paper bfloat16: TFLOP/s / over sdpa_cudnn / over best",
        "",
        "| | 512 | 1,024 |",
        "|---|---|---|",
        "| d64 full | 137 / 2.00 / 2.00 | 137 / 1.00 / 1.00 |",
        "",
    ]
    assert report.markdown(paper_rows()[1::2], H200) == ""


def test_stars_are_the_peers_that_did_not_run():
    shape = shapes.gpt2()[0]
    rows = {
        "sdpa_cudnn": Row("paper", "fwd_bwd", shape.name, "float16", "sdpa_cudnn", 64, 1024, True)
    }
    assert (
        report.stars(rows, H200, "ms")
        == "  sdpa_flash* 2.619 ms  sdpa_efficient* 5.132 ms  eager* 19.844 ms"
    )
    assert report.stars(rows, H200, "TFLOP/s") == report.stars({}, H200, "ms") == ""
    assert report.stars(rows, "another GPU", "ms") == ""


def test_missing_times_are_reported_once():
    rows = paper_rows()
    for row in rows[1::2]:
        row.ms, row.tflops, row.note = None, None, "no kernel"
    assert report.notes(rows) == [
        "sdpa_cudnn: no kernel (fwd b32 h32 s512 d64 full and 1 more)",
    ]
    assert report.summary(rows, H200) == []
    assert "sdpa_cudnn -" in report.speed_line(
        dict(zip(("ours", "sdpa_cudnn"), rows, strict=False)), H200, "TFLOP/s"
    )


def test_rows_survive_a_file(tmp_path):
    rows = paper_rows()
    report.write_json(str(tmp_path / "a.json"), rows, {"device": H200})
    assert report.read_json(str(tmp_path / "a.json")) == (rows, {"device": H200})
    report.write_csv(str(tmp_path / "a.csv"), rows)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + len(rows)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    machine = {"device": H200, "torch": "2", "date": "today"}
    assert report.picture(str(tmp_path / "a.png"), paper_rows(), machine) == ""
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "no speed" in report.picture(str(tmp_path / "b.png"), [], machine)


def problem(feature="plain", device="cpu", **shape):
    size = {"batch": 2, "seqlen": 256, "heads": 4, "head_dim": 32} | shape
    return workload.Problem(Shape(**size), torch.float32, torch.device(device), feature)


CHECKED = {
    "causal": {"causal": True},
    "gqa": {"heads_k": 2, "seqlen": 100, "seqlen_k": 300, "causal": True},
    "blocks": {"seqlen": 512, "density": 0.5},
    **{f: {"feature": f} for f in workload.FEATURES},
    "dropout of the shape": {"dropout": 0.1},
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("op", ["fwd", "bwd", "fwd_bwd"])
def test_check_passes_ours(name, op, device):
    given = problem(device=device, **CHECKED[name])
    results = implementations.make_call("ours", given, op)()
    expected = workload.reference(given, op)
    assert len(results) == len(expected) == {"fwd": 1, "bwd": 3, "fwd_bwd": 4}[op]
    assert workload.check(given, results, expected)[1] == ""


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("harm", ["row", "scale", "nan"])
def test_check_finds_a_wrong_result(which, harm):
    given = problem(causal=True, seqlen=512)
    results = [x.clone() for x in implementations.make_call("ours", given, "fwd_bwd")()]
    if harm == "row":
        results[which][-1, 300, -1] += 0.02 + results[which][-1, 300, -1].abs()
    elif harm == "scale":
        results[which] *= 1.001
    else:
        results[which][-1, 5, -1, 3] = float("nan")
    assert workload.check(given, results, workload.reference(given, "fwd_bwd"))[1]


def test_check_of_dropout_finds_a_missing_scale():
    given = problem("dropout", seqlen=512)
    results = implementations.make_call("ours", given, "fwd")()
    expected = workload.reference(given, "fwd")
    assert workload.check(given, results, expected)[1] == ""
    assert workload.check(given, [0.9 * x for x in results], expected)[1]


def test_unsupported_says_what():
    with pytest.raises(implementations.Unsupported, match="softcap"):
        implementations.make_call("sdpa", problem("softcap"), "fwd")
    with pytest.raises(implementations.Unsupported, match="block"):
        implementations.make_call("sdpa", problem(density=0.5), "fwd")


def test_measure_interleaves():
    seen = []
    calls = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    found = timing.measure(calls, False, seconds=0.0, least=3)
    assert [t.rounds for t in found.values()] == [3, 3, 3]
    assert "".join(seen) == "abc" + "abc" + "bca" + "cab"
    assert timing.measure({}, False, 1.0) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_measure_on_a_gpu():
    """A short call is replayed as a graph; a long one is timed as it is, and takes longer."""
    with torch.cuda.stream(torch.cuda.Stream()):
        small, large = torch.ones(256, device="cuda"), torch.ones(1 << 29, device="cuda")
        calls = {"small": lambda: small.mul_(1), "large": lambda: large.mul_(1)}
        for call in calls.values():
            call()
        found = timing.measure(calls, True, 0.01)
        assert (found["small"].how, found["large"].how) == ("graph", "events")
        assert 10 * found["small"].seconds < found["large"].seconds
        assert timing.peak_bytes(lambda: torch.empty(1 << 20, device="cuda")) == 4 << 20


def test_program(device, tmp_path):
    """One run as a user starts it: the table, the files, then the table again from the file."""
    program = [sys.executable, str(FOLDER / "bench.py")]
    file, table = tmp_path / "a.json", tmp_path / "a.csv"
    impl = "ours,sdpa,fa3" if device == "cpu" else "ours,sdpa"
    options = ["--device", device, "--shapes", "tiny", "--op", "fwd,bwd", "--impl", impl]
    files = ["--json", str(file), "--csv", str(table)]
    done = subprocess.run(
        [*program, *options, "--seconds", "0.01", *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("b2 h4 s128 d32 causal", "geometric mean", "/sdpa"):
        assert word in done.stdout
    assert ("fa3 does not run: GPU only" in done.stdout) == (device == "cpu")
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 and all(row["ms"] > 0 and row["error"] < 1e-4 for row in rows)
    if device == "cpu":
        assert {row["how"] for row in rows} == {"wall"}
    again = subprocess.run([*program, "--load", str(file)], capture_output=True, text=True)
    assert again.returncode == 0 and "geometric mean" in again.stdout


def test_program_refuses(capsys):
    for arguments, word in (
        (["--op", "forward"], "'forward' is not one of fwd"),
        (["--impl", "fa2"], "'fa2' is not one of ours"),
        (["--shapes", "large"], "'large' is not one of paper"),
    ):
        with pytest.raises(SystemExit):
            bench.parse(arguments)
        assert word in capsys.readouterr().err


def test_wrong_results_of_ours_are_not_timed(monkeypatch):
    """They are reported, and the program's status says so."""
    right = implementations.make_call

    def wrong(name, given, op):
        call = right(name, given, op)
        return (lambda: [2 * x for x in call()]) if name == "ours" else call

    monkeypatch.setattr(bench, "make_call", wrong)
    options = ["--device", "cpu", "--shapes", "tiny", "--op", "fwd", "--impl", "ours,sdpa"]
    assert bench.main([*options, "--seconds", "0.01"]) == 1
