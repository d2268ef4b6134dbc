# SPDX-License-Identifier: BSD-3-Clause
"""benchmarks/paper.py: each table runs, in sizes that take seconds; what ncu prints is summed; a
failure of ours is a failure of the program.
"""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import paper  # noqa: E402
import paper_attention  # noqa: E402
import paper_training  # noqa: E402
from paper_attention import Setting  # noqa: E402


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_paper_attention_tables(device, tmp_path, capsys):
    tables = ["attention", "io", "memory", "sparse"]
    assert paper.main([*tables, "--device", device, "--small", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}: " in printed for name in tables)
    rows = rows_of(tmp_path / "attention.csv")
    assert {row["impl"] for row in rows} == {"eager", "sdpa", "ours"}
    assert all(float(row["fwd_bwd_ms"]) > 0 and not row.get("note") for row in rows)
    densities = {float(r["density"]) for r in rows_of(tmp_path / "sparse.csv")}
    assert min(densities) <= 0.5 and max(densities) == 1
    memory = rows_of(tmp_path / "memory.csv")
    if device == "cpu":
        assert memory == [{"impl": "ours", "needs": "a GPU"}]
    else:
        mib = {(r["impl"], r["seqlen"]): float(r["MiB"]) for r in memory}
        assert mib["ours", "1024"] < 0.25 * mib["eager", "1024"]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_paper_training_table(name, device, tmp_path):
    """One seed, the same batches: the losses agree, step by step."""
    pytest.importorskip("transformers")
    arguments = ["--impl", "eager,ours", "--steps", "4", "--device", device, "--small"]
    task = paper_training.task_of(Setting(device, True, (), 4, 0.0), name, 2, 512)
    runs = {impl: paper_training.train(task, impl) for impl in ("eager", "ours")}
    pairs = list(zip(runs["eager"]["losses"], runs["ours"]["losses"], strict=True))
    assert len({loss for loss, _ in pairs}) == 4
    assert max(abs(a - b) for a, b in pairs) < (1e-5 if device == "cpu" else 2e-2)
    assert paper.parse([name, *arguments]).steps == 4
    row = paper_training.row_of(task, "ours", runs["ours"])
    assert row["tokens/s"] > 0 and row["first_loss"] == runs["ours"]["losses"][0]


def test_paper_judges_losses_by_another_seed():
    def rows(**losses):
        return {name: {"losses": found} for name, found in losses.items()}

    found = rows(eager=[9.0, 4.0, 3.0, 2.0], ours=[1.0, 4.0, 3.1, 2.0], sdpa=[9.0, 4.0, 3.0, 3.0])
    paper_training.judge(found)
    assert found["ours"]["off"] == pytest.approx(0.05) and "agrees" not in found["ours"]
    found[paper_training.OTHER_SEED] = {"losses": [9.0, 4.0, 3.2, 2.2]}
    paper_training.judge(found)
    assert found["ours"]["agrees"] == "within seed noise" and found["sdpa"]["agrees"] == "no"
    found["ours"]["losses"][3] = 2.7
    paper_training.judge(found)
    assert found["ours"]["agrees"] == "as sdpa does" and "note" not in found["ours"]
    found["ours"]["losses"][3] = 4.0
    paper_training.judge(found)
    assert found["ours"]["agrees"] == "no" and "further" in found["ours"]["note"]
    found = {"eager": {"note": "out of memory"}, "ours": {"losses": [1.0]}}
    paper_training.judge(found)
    assert "off" not in found["ours"]


def test_paper_rows_are_written_as_they_come(tmp_path, monkeypatch):
    """A run that is cut off leaves what it has measured."""

    def broken(setting):
        yield {"impl": "ours", "ms": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(paper, "TABLES", {"broken": paper.Table(broken, ("", "ms", False))})
    with pytest.raises(KeyboardInterrupt):
        paper.main(["broken", "--device", "cpu", "--out", str(tmp_path)])
    assert rows_of(tmp_path / "broken.csv") == [{"impl": "ours", "ms": "1.0"}]


def test_paper_failed_training_says_why():
    pytest.importorskip("transformers")
    task = paper_training.task_of(Setting("cpu", True, (), 1, 0.0), "gpt2", 2, 512)
    row = paper_training.row_of(task, "nothing", paper_training.train(task, "nothing"))
    assert "nothing" in row["note"] and "ms" not in row


def test_paper_sums_what_ncu_prints():
    text = (
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","a","dram__bytes_read.sum","byte","1,000,000,000"\n'
        '"0","a","dram__bytes_write.sum","byte","500,000,000"\n'
        '"1","b","dram__bytes_read.sum","byte","250000000"\n'
        '"1","b","dram__bytes_write.sum","byte","0"\n'
    )
    found = paper_attention.totals(text)
    assert found == {"kernels": 2, "read": 1.25, "written": 0.5, "GB": 1.75}


@pytest.mark.parametrize(("impl", "status"), [("ours", 1), ("sdpa", 0)])
def test_paper_status(impl, status, tmp_path, monkeypatch):
    """Only what ours fails at is a failure; and pictures need something to draw."""
    table = paper.Table(lambda setting: [{"impl": impl, "note": "broken"}], ("", "ms", False))
    monkeypatch.setattr(paper, "TABLES", {"broken": table})
    assert paper.main(["broken", "--device", "cpu", "--out", str(tmp_path)]) == status
    assert not (tmp_path / "broken.png").exists()


def test_paper_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"case": "a", "impl": n, "ms": 1.5, "losses": [3.0, 2.0]} for n in ("eager", "ours")]
    table = paper.Table(lambda setting: rows, ("", "ms", False), True)
    path = tmp_path / "a.png"
    assert paper.draw(path, "a", table, rows) == str(path) and path.stat().st_size > 1000
    lines = paper.Table(lambda setting: rows, ("seqlen", "ms", True))
    rows = [row | {"seqlen": 128} for row in rows]
    assert paper.draw(path, "a", lines, rows) == str(path)
