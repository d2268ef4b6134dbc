# SPDX-License-Identifier: BSD-3-Clause
"""`flash-attn demo`: trains one small GPT-2 twice on real text, with transformers' eager
attention and with this package's, and generates from it through the KV cache.

Each run is a process of its own (`python -m flash_attn._demo`), so that its peak memory is its
own; it reports one JSON object a line. Both start from one seed and see the same batches, and
dropout is off, so the losses may differ by rounding alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

EAGER, OURS = "eager", "flash_attn"
VOCABULARY = 256  # bytes
PROMPT = "def "


@dataclass
class Settings:
    """Size of the model and of the work; `for_device` has defaults that fit a device."""

    device: str
    length: int  # tokens of one sequence
    batch: int
    layers: int
    width: int
    heads: int
    steps: int
    learning_rate: float
    new_tokens: int
    seed: int = 0
    file: str | None = None  # None: the standard library's sources

    @classmethod
    def for_device(cls, device: str) -> Settings:
        if device == "cpu":
            return cls(device, 1024, 2, 2, 128, 2, 100, 2e-3, 200)
        return cls(device, 2048, 8, 12, 768, 12, 100, 6e-4, 300)


def available() -> str:
    """Why the demo cannot run, or ''."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "the demo needs transformers: pip install 'flash-attn[hf]'"
    return ""


def read_text(file: str | None, limit: int = 8 << 20) -> bytes:
    """The user's file, or the standard library's own sources, at most `limit` bytes."""
    if file is not None:
        return Path(file).read_bytes()[:limit]
    root, parts, total = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if "site-packages" in path.parts:
            continue
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= limit:
            break
    return b"\n".join(parts)[:limit]


# ---- one run, in a process of its own


def report(**fields) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def peak_bytes(device: str) -> int:
    """Most memory this process (on a GPU: its tensors) has held."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def build_model(settings: Settings, implementation: str):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from .integrations.transformers import register

    name = register() if implementation == OURS else EAGER
    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=settings.length,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=name,
    )
    return GPT2LMHeadModel(config).to(settings.device)


def mixed_precision(device: str):
    """Products in bf16 on a GPU."""
    import torch

    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


def run(settings: Settings, implementation: str) -> None:
    """Trains, reports each step's loss, then generates."""
    import torch

    text = torch.frombuffer(bytearray(read_text(settings.file)), dtype=torch.uint8)
    if len(text) <= settings.length:
        raise ValueError(
            f"flash_attn: the text must be longer than one sequence of {settings.length} bytes, "
            f"got {len(text)}"
        )
    model = build_model(settings, implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, 0.1, total_iters=max(1, settings.steps // 5)
    )
    places = torch.Generator().manual_seed(settings.seed)
    report(parameters=sum(p.numel() for p in model.parameters()), bytes=len(text))
    base, times = peak_bytes(settings.device), []
    model.train()
    for step in range(settings.steps):
        starts = torch.randint(len(text) - settings.length, (settings.batch,), generator=places)
        rows = torch.stack([text[s : s + settings.length] for s in starts.tolist()])
        tokens = rows.long().to(settings.device)
        begin = time.perf_counter()
        with mixed_precision(settings.device):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        value = loss.item()  # waits for the GPU
        times.append(time.perf_counter() - begin)
        report(step=step + 1, loss=value)
    report(seconds=median(times), peak=peak_bytes(settings.device), base=base)
    report(**generate(model, settings))


def generate(model, settings: Settings) -> dict:
    """Samples through the KV cache; compares its logits with one pass over the result without
    it."""
    import torch

    prompt = torch.tensor([list(PROMPT.encode())], device=settings.device)
    new_tokens = min(settings.new_tokens, settings.length - prompt.shape[1])
    model.eval()
    torch.manual_seed(settings.seed)
    begin = time.perf_counter()
    with torch.no_grad(), mixed_precision(settings.device):
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=0.7,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        seconds = time.perf_counter() - begin
        cached = torch.stack(made.logits, 1)
        whole = model(input_ids=made.sequences, use_cache=False).logits
        whole = whole[:, prompt.shape[1] - 1 : -1]
    return {
        "text": bytes(made.sequences[0].tolist()).decode(errors="replace"),
        "rate": new_tokens / seconds,
        "cache_error": (cached - whole).abs().max().item(),
    }


# ---- both runs, side by side


def collect(settings: Settings, implementation: str) -> dict:
    """Starts one run, shows its progress, returns what it reported."""
    command = [sys.executable, "-m", __name__, implementation, json.dumps(asdict(settings))]
    return follow(command, settings.steps, f"{implementation:>10}")


def follow(command: list[str], steps: int, title: str) -> dict:
    """Runs a command that trains and reports one JSON object a line, under a progress bar.

    Returns:
        All that it reported; its losses as the list "losses"; why it "failed", if it did.
    """
    from tqdm import tqdm

    found: dict = {"losses": []}
    pace = 0.1 if sys.stderr.isatty() else 10  # seconds: a log keeps every state of the bar
    with (
        tempfile.TemporaryFile("w+", errors="replace") as messages,  # a pipe could fill up
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True) as process,
        tqdm(total=steps, desc=title, unit="step", mininterval=pace) as bar,
    ):
        for line in process.stdout:
            fields = json.loads(line)
            if "loss" in fields:
                found["losses"].append(fields["loss"])
                bar.set_postfix(loss=f"{fields['loss']:.4f}", refresh=False)
                bar.update()
            else:
                found |= fields
        process.wait()
        messages.seek(0)
        lines = messages.read().strip().splitlines()
    if process.returncode:
        found["failed"] = lines[-1] if lines else f"exit status {process.returncode}"
    return found


def demo(settings: Settings) -> int:
    """Runs both and prints the comparison; returns the exit status."""
    begin = time.perf_counter()
    print(describe(settings), flush=True)
    runs = {name: collect(settings, name) for name in (EAGER, OURS)}
    print(comparison(settings, runs))
    ours = runs[OURS]
    if "text" in ours:
        print(
            f"\nGenerated through the KV cache, {ours['rate']:.0f} tokens/s; logits differ from "
            f"one pass without it by at most {ours['cache_error']:.1e}:\n"
        )
        print("\n".join("    " + line for line in ours["text"].splitlines()))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    return 1 if "failed" in ours else 0


def describe(settings: Settings) -> str:
    text = settings.file or "the sources of Python's standard library"
    return (
        f"GPT-2: {settings.layers} layers, width {settings.width}, {settings.heads} heads; bytes "
        f"of {text}; {settings.steps} steps of {settings.batch} x {settings.length} tokens on "
        f"{settings.device}; dropout 0, one seed"
    )


def comparison(settings: Settings, runs: dict) -> str:
    """Losses side by side, then time and memory."""
    lines = ["", f"{'':>14}" + "".join(f"{name:>14}" for name in runs) + f"{'difference':>14}"]
    both = list(zip(*(run["losses"] for run in runs.values()), strict=False))
    every = max(1, settings.steps // 10)
    for step, (a, b) in enumerate(both):
        if step not in (0, len(both) - 1) and (step + 1) % every:
            continue
        lines.append(f"{f'loss {step + 1}':>14}{a:>14.5f}{b:>14.5f}{b - a:>14.1e}")
    rows = {
        "s a step": lambda run: f"{run['seconds']:.3f}",
        "peak memory": lambda run: f"{run['peak'] / 2**20:.0f} MiB",
        "of training": lambda run: f"{(run['peak'] - run['base']) / 2**20:.0f} MiB",
    }
    for title, cell in rows.items():
        cells = "".join(f"{cell(run) if 'peak' in run else '-':>14}" for run in runs.values())
        lines.append(f"{title:>14}{cells}")
    if both:
        most = max(abs(a - b) for a, b in both)
        lines.append(f"\nLargest difference of the losses: {most:.1e}")
    lines += [f"{name} failed: {run['failed']}" for name, run in runs.items() if "failed" in run]
    return "\n".join(lines)


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[2])), sys.argv[1])
