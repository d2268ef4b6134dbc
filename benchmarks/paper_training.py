# SPDX-License-Identifier: BSD-3-Clause
"""Training through Hugging Face, for paper.py: one model with each implementation of attention.

Each run is a process of its own (python paper_training.py JSON), so that its peak memory is its
own; it reports one JSON object a line. All runs of a model begin with one seed and see the same
batches of real text, so that without dropout their losses differ by rounding alone.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import mean, median

import torch
from paper_attention import Setting  # puts a checkout that is built in place on the path

WARM_UP = 5  # steps that are not timed
MASKED = 0.15  # of BERT's tokens
OTHER_SEED = "eager, another seed"


@dataclass(frozen=True)
class Task:
    """One model and its batches."""

    model: str  # "gpt2" or "bert"
    batch: int
    seqlen: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    device: str
    steps: int
    dropout: float
    learning_rate: float = 1.5e-4
    seed: int = 0  # of the weights

    @property
    def name(self) -> str:
        return f"{self.model} {self.batch} x {self.seqlen}"


def task_of(setting: Setting, model: str, batch: int, seqlen: int) -> Task:
    """GPT-2 small or BERT-large; a tiny one where sizes are small."""
    if setting.small:
        batch, seqlen, sizes = 2, seqlen // 8, (2, 64, 2, 256)
    else:
        sizes = (12, 768, 12, 50257) if model == "gpt2" else (24, 1024, 16, 30522)
    rate = 1.5e-4 if model == "gpt2" else 1e-4  # for batches as small: 6e-4 makes the loss jump
    return Task(model, batch, seqlen, *sizes, setting.device, setting.steps, setting.dropout, rate)


def gpt2(setting: Setting) -> Iterator[dict]:
    """A step of training GPT-2 small: milliseconds, GiB, losses"""
    for batch, seqlen in ((16, 1024), (4, 4096)):
        task = task_of(setting, "gpt2", batch, seqlen)
        yield from compare(setting, task, noise=seqlen == 1024)  # eager is slow at 4,096


def bert(setting: Setting) -> Iterator[dict]:
    """A step of training BERT-large: milliseconds, GiB, losses"""
    yield from compare(setting, task_of(setting, "bert", 32, 512))


def context(setting: Setting) -> Iterator[dict]:
    """GPT-2 small, 16k tokens a step in longer contexts: eager at 1,024 against ours"""
    short = task_of(setting, "gpt2", 16, 1024)
    first = row_of(short, "eager", train(short, "eager"))
    first["times_eager"] = 1.0
    yield first
    for batch, seqlen in ((16, 1024), (8, 2048), (4, 4096)):
        task = task_of(setting, "gpt2", batch, seqlen)
        row = row_of(task, "ours", train(task, "ours"))
        if "ms" in row and "ms" in first:
            tokens = task.batch * task.seqlen / (short.batch * short.seqlen)
            row["times_eager"] = row["ms"] / tokens / first["ms"]
        yield row


def compare(setting: Setting, task: Task, noise: bool = True) -> Iterator[dict]:
    """One row an implementation, and with `noise` one of eager attention whose weights begin with
    another seed, over the same batches. Rows are completed by `judge` at the end."""
    rows: dict[str, dict] = {}
    for impl in setting.impls:
        rows[impl] = row_of(task, impl, train(task, impl))
        yield rows[impl]
    if "eager" not in rows:
        return
    if noise and len(rows) > 1:
        other = replace(task, seed=task.seed + 1)
        rows[OTHER_SEED] = row_of(task, OTHER_SEED, train(other, "eager"))
        yield rows[OTHER_SEED]
    judge(rows)


def judge(rows: dict[str, dict]) -> None:
    """Adds `off` to each row that has losses, its distance from eager's, and where another seed is
    among them `agrees`, whether it is at most that one's. Ours may also be as far as sdpa, which is
    the same training in another rounding; beyond both it gets a note.

    `off` is the mean over the second half of the steps, when all have left the first steep fall.
    """
    eager = rows["eager"].get("losses")
    found = {name: row for name, row in rows.items() if eager and row.get("losses")}
    for row in found.values():
        pairs = list(zip(row["losses"], eager, strict=True))
        row["off"] = mean(abs(a - b) for a, b in pairs[len(pairs) // 2 :])
    if OTHER_SEED not in found:
        return
    noise, rounding = found[OTHER_SEED]["off"], found.get("sdpa", {}).get("off", 0.0)
    for name, row in found.items():
        if name in ("eager", OTHER_SEED):
            continue
        within = row["off"] <= noise
        row["agrees"] = "within seed noise" if within else "no"
        if name == "ours" and not within:
            if row["off"] <= rounding:
                row["agrees"] = "as sdpa does"
            else:
                row["note"] = f"losses further from eager's than another seed's ({noise:.1e})"


def row_of(task: Task, impl: str, found: dict) -> dict:
    row: dict[str, object] = {"case": task.name, "impl": impl}
    if found.get("failed"):
        return row | {"note": found["failed"][:160]}
    return row | {
        "ms": found["seconds"] * 1e3,
        "tokens/s": task.batch * task.seqlen / found["seconds"],
        "GiB": found["peak"] / 2**30,
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
        "losses": found["losses"],
    }


def train(task: Task, impl: str) -> dict:
    """What one run reported."""
    from flash_attn._demo import follow

    command = [sys.executable, __file__, json.dumps(asdict(task)), impl]
    return follow(command, task.steps, f"{task.name} {impl}")


# ---- one run, in a process of its own


def build_model(task: Task, impl: str):
    from flash_attn.integrations.transformers import register

    name = register() if impl == "ours" else impl
    torch.manual_seed(task.seed)
    with torch.device(task.device):  # where its weights are drawn
        return _model(task, name)


def _model(task: Task, name: str):
    import transformers

    if task.model == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=task.vocabulary,
            n_positions=task.seqlen,
            n_embd=task.width,
            n_layer=task.layers,
            n_head=task.heads,
            attn_pdrop=task.dropout,
            resid_pdrop=task.dropout,
            embd_pdrop=task.dropout,
            attn_implementation=name,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        vocab_size=task.vocabulary,
        max_position_embeddings=task.seqlen,
        hidden_size=task.width,
        num_hidden_layers=task.layers,
        num_attention_heads=task.heads,
        intermediate_size=4 * task.width,
        hidden_dropout_prob=task.dropout,
        attention_probs_dropout_prob=task.dropout,
        attn_implementation=name,
    )
    return transformers.BertForMaskedLM(config)


def batches(task: Task) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of random places in real text, byte by byte; BERT's masked. The same for
    every seed of the weights."""
    from flash_attn._demo import read_text

    text = torch.frombuffer(bytearray(read_text(None)), dtype=torch.uint8)
    places = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - task.seqlen, (task.batch,), generator=places)
        tokens = torch.stack([text[s : s + task.seqlen] for s in starts.tolist()]).long()
        labels = tokens
        if task.model == "bert":
            hidden = torch.rand(tokens.shape, generator=places) < MASKED
            labels = tokens.masked_fill(~hidden, -100)
            tokens = tokens.masked_fill(hidden, 0)
        yield tokens.to(task.device), labels.to(task.device)


def run(task: Task, impl: str) -> None:
    from flash_attn._demo import mixed_precision, peak_bytes, report

    model = build_model(task, impl)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, fused=task.device == "cuda"
    )
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    extra = {"use_cache": False} if task.model == "gpt2" else {}
    times = []
    for _, (tokens, labels) in zip(range(task.steps), batches(task), strict=False):
        begin = time.perf_counter()
        with mixed_precision(task.device):
            loss = model(input_ids=tokens, labels=labels, **extra).loss
        loss.backward()
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        value = loss.item()  # waits for the GPU
        times.append(time.perf_counter() - begin)
        report(loss=value)
    report(seconds=median(times[min(WARM_UP, len(times) - 1) :]), peak=peak_bytes(task.device))


if __name__ == "__main__":
    run(Task(**json.loads(sys.argv[1])), sys.argv[2])
