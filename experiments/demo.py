"""Trains a small GPT on real text with interleaved updates: `python -m experiments.demo`.

Three runs from one seed: updates on the host alone, every second subgroup on the device, and
the stride that the performance model chose. They must end with the same bits. On a machine
without a GPU the device is a virtual one, paced like a named node, and everything that comes
from it says so.

Prints a table, then one JSON object as the last line of standard output. Progress goes to
standard error. Exit code 0 only if the loss fell below the unigram entropy of the text and all
runs ended with the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import dos
from dos.execute.record import StepRecord
from dos.trace import write_trace
from experiments.pacing import MeasuredSteps, time_scale_for
from experiments.text import VOCABULARY, batch, standard_library_text, unigram_entropy_nats
from experiments.tiny_gpt import TinyGPT
from perfmodel.profile import H100_NODE
from perfmodel.report import plot_timeline

TEXT_BYTES = 4 << 20
SEQUENCES, LENGTH, WIDTH, LAYERS, HEADS = 16, 128, 256, 4, 8
SUBGROUP_SIZE = 156 * 1024
LEARNING_RATE, WARMUP_STEPS = 2e-3, 10
AVERAGED_STEPS = 10
"""The loss reported is the mean of this many steps: single batches are noisy."""


@dataclass
class Run:
    """One training run."""

    name: str
    stride: str
    losses: list[float] = field(default_factory=list)
    steps: MeasuredSteps = field(default_factory=MeasuredSteps)
    train_s: float = 0.0
    digest: str = ""
    label: str = ""

    @property
    def shown(self) -> StepRecord:
        """The step whose timeline is shown: the median one of those that count."""
        return self.steps.median_step()


def train(name: str, stride: float | str, device: object, text: torch.Tensor, steps: int) -> Run:
    """Train one model from the fixed seed; the bits depend on nothing but `steps`."""
    torch.manual_seed(0)
    home = "cpu" if isinstance(device, dos.VirtualDevice) else str(device)
    model = TinyGPT(VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS).to(home, torch.bfloat16)
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95)),
        stride=stride,
        subgroup_size=SUBGROUP_SIZE,
        device=device,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    run = Run(name, optimizer.plan.stride)
    generator = torch.Generator().manual_seed(1)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        bar = progress.add_task(f"{name:>9}", total=steps, now="")
        started_s = time.perf_counter()
        for done in range(1, steps + 1):
            window = batch(text, generator, sequences=SEQUENCES, length=LENGTH).to(home)
            loss = model.loss(window)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            assert optimizer.last_step is not None
            run.steps.add(optimizer.last_step)
            run.losses.append(loss.item())
            run.train_s = time.perf_counter() - started_s
            tokens_per_s = done * SEQUENCES * LENGTH / run.train_s
            now = f"loss {loss.item():.3f}  {tokens_per_s:,.0f} tokens/s"
            progress.update(bar, completed=done, now=now)
    run.label = run.shown.label
    run.digest = digest_of(model, optimizer)
    optimizer.close()
    return run


def digest_of(model: torch.nn.Module, optimizer: dos.DOSOptimizer) -> str:
    """A digest of every bit of weights and optimizer state."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def choose_device() -> object:
    """The GPU when there is one, else a virtual device paced like an H100 node."""
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    scale = time_scale_for(H100_NODE, SUBGROUP_SIZE)
    return dos.VirtualDevice(pace=H100_NODE, time_scale=scale)


def table_of(runs: list[Run]) -> Table:
    """Step time and busy share per lane of each run."""
    table = Table(title=f"Optimizer step on {runs[0].label}")
    for heading in ("run", "stride", "step (ms)", "against host"):
        table.add_column(heading, justify="right")
    lanes = ("host", "h2d", "device", "d2h")
    for lane in lanes:
        table.add_column(f"{lane} busy", justify="right")
    host_s = runs[0].steps.step_s
    for run in runs:
        step_s, busy = run.steps.step_s, run.steps.busy_share()
        table.add_row(
            run.name,
            run.stride,
            f"{step_s * 1e3:.2f}",
            f"{host_s / step_s:.2f}x",
            *(f"{busy.get(lane, 0.0):.0%}" for lane in lanes),
        )
    return table


def figures_of(runs: list[Run], entropy: float, device: object) -> dict[str, object]:
    """All figures, for programs."""
    losses = runs[0].losses
    final_loss = statistics.fmean(losses[-AVERAGED_STEPS:])
    host_s = runs[0].steps.step_s
    return {
        "device": runs[0].label,
        "virtual": isinstance(device, dos.VirtualDevice),
        "time_scale": device.time_scale if isinstance(device, dos.VirtualDevice) else 1.0,
        "steps": len(losses),
        "tokens_per_s": {
            run.name: round(len(losses) * SEQUENCES * LENGTH / run.train_s) for run in runs
        },
        "unigram_entropy_nats": round(entropy, 4),
        "first_loss_nats": round(losses[0], 4),
        "final_loss_nats": round(final_loss, 4),
        "loss_fell": final_loss < 0.97 * entropy,
        "same_bits": len({run.digest for run in runs}) == 1,
        "stride": {run.name: run.stride for run in runs},
        "step_s": {run.name: run.steps.step_s for run in runs},
        "against_host": {run.name: round(host_s / run.steps.step_s, 3) for run in runs},
        "busy_share": {run.name: run.steps.busy_share() for run in runs},
        "steps_left_out": {run.name: run.steps.left_out for run in runs},
        "void": [run.name for run in runs if run.steps.void],
    }


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=80, help="steps per run")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of the files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    text = standard_library_text(TEXT_BYTES)
    entropy = unigram_entropy_nats(text)
    device = choose_device()
    strides: dict[str, float | str] = {"host-only": "host", "k=2": 2, "chosen": "auto"}
    runs = [train(name, k, device, text, options.steps) for name, k in strides.items()]

    picture, trace = options.out / "timeline.png", options.out / "trace.json"
    label = runs[0].label
    headings = {
        f"{run.name} (stride {run.stride}): {run.steps.step_s * 1e3:.2f} ms": run.shown.spans()
        for run in runs
    }
    plot_timeline(headings, picture, title=f"One optimizer step on {label}")
    write_trace(runs[-1].shown.spans(), trace, process=f"step, stride {runs[-1].stride}, {label}")

    figures = figures_of(runs, entropy, device)
    Console(width=100).print(table_of(runs))
    if figures["virtual"]:
        print(f"All times are those of a {label}: an emulation, no measurement of a GPU.")
    if figures["void"]:
        print(f"Void, the machine was too busy to keep the pace: {figures['void']}")
    print(f"timeline: {picture}\ntrace (open in ui.perfetto.dev): {trace}")
    print(json.dumps({**figures, "timeline_png": str(picture), "trace_json": str(trace)}))
    return 0 if figures["loss_fell"] and figures["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
