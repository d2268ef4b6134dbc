# SPDX-License-Identifier: BSD-3-Clause
"""The console command: what it prints, what it refuses; and memory that stays linear in the
length."""

import subprocess
import sys

import pytest

from flash_attn import _demo, _ops, cli

SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--length", "64", "--batch", "2"]


def run(*arguments):
    command = [sys.executable, "-m", "flash_attn.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_cli_info():
    done = run("info")
    assert done.returncode == 0, done.stderr
    for word in ("flash_attn   2.8.3", "torch", "threads", "cpu_scalar", "forward", "float64"):
        assert word in done.stdout


def test_cli_info_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(_ops, "_C_cuda", None)
    monkeypatch.setattr(_ops, "CUDA_MISSING", "not built")
    monkeypatch.setattr(cli, "version_of", lambda name: "")
    text = cli.info_text()
    assert "pip install 'flash-attn[hf]'" in text and "FLASH_ATTN_CUDA=1" in text


def test_cli_version_and_help(capsys):
    for arguments, status, words in (
        (["--version"], 0, "2.8.3"),
        (["--help"], 0, "demo"),
        ([], 2, "command"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        captured = capsys.readouterr()
        assert caught.value.code == status and words in captured.out + captured.err


def test_cli_bench(tmp_path, monkeypatch, capsys):
    """Options go through, the status comes back; without a checkout it says so."""
    done = run("bench", "--op", "unknown")
    assert done.returncode == 2 and "'unknown' is not one of fwd" in done.stderr
    done = run("bench", "paper", "unknown")
    assert done.returncode == 2 and "'unknown' is not one of attention" in done.stderr
    monkeypatch.setattr(cli, "_BENCHMARKS", tmp_path)
    for arguments in (["bench"], ["bench", "paper"]):
        assert cli.main(arguments) == 2 and "needs a checkout" in capsys.readouterr().err


def test_cli_demo():
    """Both runs train, the losses agree, text comes out."""
    pytest.importorskip("transformers")
    done = run("demo", "--device", "cpu", "--steps", "6", "--new-tokens", "20", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("loss 6", "s a step", "peak memory", "Generated through the KV cache", "def "):
        assert word in done.stdout
    most = float(done.stdout.split("difference of the losses:")[1].split()[0])
    assert most < 1e-4
    assert "flash_attn: 100%" in done.stderr


def test_cli_demo_of_a_file(tmp_path, monkeypatch):
    """The options reach the runs; the text is the file's."""
    pytest.importorskip("transformers")
    path = tmp_path / "text"
    path.write_text("to be or not to be " * 50)
    seen = []
    monkeypatch.setattr(_demo, "demo", lambda settings: seen.append(settings) or 0)
    assert cli.main(["demo", "--device", "cpu", "--file", str(path), "--steps", "2", *SMALL]) == 0
    assert (seen[0].file, seen[0].steps, seen[0].width) == (str(path), 2, 32)
    assert _demo.read_text(seen[0].file) == path.read_bytes()
    assert str(path) in _demo.describe(seen[0])


def test_cli_demo_refuses(tmp_path, capsys):
    path = tmp_path / "short"
    path.write_text("x")
    for arguments, words in (
        (["--file", str(path)], "more than --length"),
        (["--file", str(tmp_path / "none")], "No such file"),
        (["--width", "30", "--heads", "4"], "multiple of --heads"),
        (["--steps", "0"], "--steps"),
    ):
        assert cli.main(["demo", "--device", "cpu", *arguments]) == 2
        assert words in capsys.readouterr().err, arguments


def test_cli_demo_reports_a_failed_run():
    """A run that dies is a line of the result, not a traceback of the parent."""
    settings = _demo.Settings("cpu", 64, 1, 1, 32, 2, 1, 1e-3, 4, file="/nonexistent")
    found = _demo.collect(settings, _demo.OURS)
    assert "FileNotFoundError" in found["failed"]
    runs = {_demo.EAGER: {"losses": []}, _demo.OURS: found}
    assert "flash_attn failed: FileNotFoundError" in _demo.comparison(settings, runs)


def test_cli_demo_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["demo", "--device", "cpu"]) == 2
    assert "pip install 'flash-attn[hf]'" in capsys.readouterr().err


def test_cli_demo_text_is_real():
    text = _demo.read_text(None, 1 << 20)
    assert len(text) == 1 << 20 and b"def " in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_linear():
    """Forward and backward over 65,536 tokens with a window: far below the 16 GiB of the
    scores."""
    code = """
import torch, flash_attn
from flash_attn._demo import peak_bytes
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 65536, 1, 32, requires_grad=True) for _ in range(3))
before = peak_bytes("cpu")
for window, length in (((64, 0), 65536), ((-1, 0), 16384)):
    x = [t[:, :length] for t in (q, k, v)]
    flash_attn.flash_attn_func(*x, window_size=window).sum().backward()
print(peak_bytes("cpu") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300 << 20  # one score matrix of the second call alone takes 1 GiB
