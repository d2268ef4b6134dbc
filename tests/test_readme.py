# SPDX-License-Identifier: BSD-3-Clause
"""README.md is true: its code runs, its example comes out, its drawings are the masks, its messages
are ours.
"""

import math
import re
from pathlib import Path

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_func

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_readme_code_runs():
    """All Python but what downloads a model, one block after the other."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    own = [block for block in blocks if "from_pretrained" not in block]
    assert len(own) >= 2
    names = {}
    for block in own:
        exec(block.replace("4096", "512"), names)
    assert names["out"].shape == (1, 512, 8, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_readme_worked_example(device, dtype):
    """Scores [0, ln 2], values [10, 20]: 50 / 3; also as two parts merged through m and l."""
    q = torch.tensor([1.0], dtype=dtype, device=device).view(1, 1, 1, 1)
    k = torch.tensor([0.0, math.log(2)], dtype=dtype, device=device).view(1, 2, 1, 1)
    v = torch.tensor([10.0, 20.0], dtype=dtype, device=device).view(1, 2, 1, 1)
    whole, lse = flash_attn_func(q, k, v, softmax_scale=1.0, return_lse=True)
    near = {"rel": 1e-6}
    assert whole.item() == pytest.approx(50 / 3, **near)
    assert lse.item() == pytest.approx(math.log(3), **near)
    parts = [
        flash_attn_func(q, k[:, i : i + 1], v[:, i : i + 1], softmax_scale=1.0, return_lse=True)
        for i in range(2)
    ]
    m = max(part[1].item() for part in parts)  # of one key, lse is its score and l is 1
    shares = [math.exp(part[1].item() - m) for part in parts]
    assert shares == pytest.approx([0.5, 1.0], **near)
    merged = sum(part[0].item() * share for part, share in zip(parts, shares, strict=True))
    assert merged / sum(shares) == pytest.approx(50 / 3, **near)


def drawings():
    """(options, queries, keys, rows of ■ and ·) of every drawing: columns of one block of text."""
    lines = TEXT.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    causal=True"))
    titles = [match for match in re.finditer(r"\S+=(\(.*?\)|\S+)", lines[first])]
    for title, end in zip(titles, [*(t.start() for t in titles[1:]), None], strict=True):
        column = [line[title.start() : end].strip() for line in lines[first + 1 : first + 7]]
        queries, keys = map(int, re.findall(r"\d+", column[0]))
        name, _, value = title[0].partition("=")
        window = tuple(map(int, re.findall(r"\d+", value)))
        yield {name: window or True}, queries, keys, column[1 : 1 + queries]


def test_readme_drawings(device):
    found = list(drawings())
    assert len(found) == 4
    for options, queries, keys, rows in found:
        q, k = (torch.zeros(1, n, 1, 8, device=device) for n in (queries, keys))
        v = torch.eye(keys, device=device).view(1, keys, 1, keys)
        weights = flash_attn_func(q, k, v, **options)[0, :, 0]
        seen = [[cell == "■" for cell in row.split()] for row in rows]
        assert (weights > 0).tolist() == seen, options


def test_readme_messages_are_ours():
    sources = "".join(path.read_text() for path in Path(flash_attn.__file__).parent.rglob("*.py"))
    sources += "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.[ch]*"))
    table = TEXT.partition("## Messages")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:]
    assert len(messages) >= 5
    for part in re.findall(r"`(.*?)`", " ".join(messages)):
        for words in filter(None, (w.strip(" ,") for w in part.split("…"))):
            plain = words.removeprefix("NotImplementedError: ")
            assert not plain or plain in sources, plain
