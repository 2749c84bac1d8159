"""Trains a small GPT on real text with interleaved updates: `python -m experiments.demo`.

Three runs from one seed: updates on the host alone, every second subgroup on the device, and
the stride that the performance model chose. They must end with the same bits. A fourth one saves
checkpoints beside its steps, kills itself half-way, and is taken up from what is on the disk:
its losses must go on, and its bits end, as if nothing had happened. On a machine without a GPU
the device is a virtual one, paced like a named node, and everything that comes from it says so.

Prints a table, then one JSON object as the last line of standard output. Progress goes to
standard error. Exit code 0 only if the loss fell below the unigram entropy of the text and all
runs ended with the same bits.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import dos
from dos.trace import write_trace
from experiments.demo_training import (
    LENGTH,
    SEQUENCES,
    SUBGROUP_SIZE,
    TEXT_BYTES,
    Run,
    train,
)
from experiments.pacing import time_scale_for
from experiments.text import standard_library_text, unigram_entropy_nats
from perfmodel.profile import H100_NODE
from perfmodel.report import plot_timeline

AVERAGED_STEPS = 10
"""The loss reported is the mean of this many steps: single batches are noisy."""


def interrupted(device: object, text: torch.Tensor, steps: int) -> Run:
    """A run in another process, killed half-way, and taken up here from its newest checkpoint."""
    with tempfile.TemporaryDirectory() as saved:
        command = [sys.executable, "-m", "experiments.demo_training", saved]
        killed = subprocess.run([*command, f"--die-after={max(1, steps // 2)}"], check=False)
        assert killed.returncode == -signal.SIGKILL, f"it ended with {killed.returncode}"
        return train("resumed", "host", device, text, steps, Path(saved))


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


def resumption(whole: Run, resumed: Run) -> dict[str, object]:
    """Whether the resumed run goes on as the one that was never killed."""
    same_losses = resumed.losses == whole.losses[resumed.first_step :]
    return {
        "resumed_at_step": resumed.first_step,
        "resumed_same": same_losses and resumed.digest == whole.digest,
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
    resumed = interrupted(device, text, options.steps)

    picture, trace = options.out / "timeline.png", options.out / "trace.json"
    label = runs[0].label
    headings = {
        f"{run.name} (stride {run.stride}): {run.steps.step_s * 1e3:.2f} ms": run.shown.spans()
        for run in runs
    }
    plot_timeline(headings, picture, title=f"One optimizer step on {label}")
    write_trace(runs[-1].shown.spans(), trace, process=f"step, stride {runs[-1].stride}, {label}")

    figures = figures_of(runs, entropy, device) | resumption(runs[0], resumed)
    Console(width=100).print(table_of(runs))
    if figures["virtual"]:
        print(f"All times are those of a {label}: an emulation, no measurement of a GPU.")
    if figures["void"]:
        print(f"Void, the machine was too busy to keep the pace: {figures['void']}")
    print(
        f"Killed half-way and resumed at step {resumed.first_step}: "
        f"{'the same losses and bits' if figures['resumed_same'] else 'OTHER LOSSES OR BITS'}."
    )
    print(f"timeline: {picture}\ntrace (open in ui.perfetto.dev): {trace}")
    print(json.dumps({**figures, "timeline_png": str(picture), "trace_json": str(trace)}))
    return 0 if all(figures[what] for what in ("loss_fell", "same_bits", "resumed_same")) else 1


if __name__ == "__main__":
    sys.exit(main())
