"""One training run of the demo: a small GPT, from one seed, saved and taken up again.

`python -m experiments.demo_training DIR --die-after N` saves into DIR, and kills itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dos
from dos.execute.record import StepRecord
from experiments.pacing import MeasuredSteps
from experiments.text import VOCABULARY, batch, standard_library_text
from experiments.tiny_gpt import TinyGPT

TEXT_BYTES = 4 << 20
SEQUENCES, LENGTH, WIDTH, LAYERS, HEADS = 16, 128, 256, 4, 8
SUBGROUP_SIZE = 156 * 1024
LEARNING_RATE, WARMUP_STEPS = 2e-3, 10
SAVE_EVERY = 2
"""Steps from one checkpoint to the next."""


@dataclass
class Run:
    """One training run."""

    name: str
    stride: str
    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    steps: MeasuredSteps = field(default_factory=MeasuredSteps)
    train_s: float = 0.0
    digest: str = ""
    label: str = ""

    @property
    def shown(self) -> StepRecord:
        """The step whose timeline is shown: the median one of those that count."""
        return self.steps.median_step()


class Training:
    """A model, its optimizer, its schedule and its data; the bits depend on nothing but the steps.

    Args:
        stride, device: of the optimizer.
        text: what is learned.
    """

    def __init__(self, stride: float | str, device: object, text: torch.Tensor) -> None:
        torch.manual_seed(0)
        self._text, self._home = text, home_of(device)
        self.model = TinyGPT(VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS).to(
            self._home, torch.bfloat16
        )
        self.optimizer = dos.DOSOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95)),
            stride=stride,
            subgroup_size=SUBGROUP_SIZE,
            device=device,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
        )
        self._windows = torch.Generator().manual_seed(1)
        self.done = 0

    def step(self) -> float:
        """Do one; its loss."""
        window = batch(self._text, self._windows, sequences=SEQUENCES, length=LENGTH)
        loss = self.model.loss(window.to(self._home))
        loss.backward()
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.item()

    def save(self, checkpointer: dos.Checkpointer) -> None:
        """Save it beside the next steps, if it is time."""
        checkpointer.save(
            self.done,
            model=self.model,
            optimizer=self.optimizer,
            extra={"schedule": self._schedule, "windows": self._windows.get_state()},
        )

    def restore(self, checkpointer: dos.Checkpointer) -> None:
        """Go on from the newest checkpoint; from the start if none was whole yet."""
        restored = checkpointer.restore(
            model=self.model, optimizer=self.optimizer, extra={"schedule": self._schedule}
        )
        if restored is not None:
            self._windows.set_state(restored.extra["windows"])
            self.done = restored.step


def train(
    name: str,
    stride: float | str,
    device: object,
    text: torch.Tensor,
    steps: int,
    saved: Path | None = None,
) -> Run:
    """Train one model, to this many steps in all; from a checkpoint on, if there is one to be."""
    training = Training(stride, device, text)
    run = Run(name, training.optimizer.plan.stride)
    if saved is not None:
        with dos.Checkpointer(saved) as checkpointer:
            training.restore(checkpointer)
    run.first_step = training.done
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        bar = progress.add_task(f"{name:>9}", total=steps, completed=training.done, now="")
        started_s = time.perf_counter()
        while training.done < steps:
            run.losses.append(training.step())
            assert training.optimizer.last_step is not None
            run.steps.add(training.optimizer.last_step)
            run.train_s = time.perf_counter() - started_s
            tokens_per_s = len(run.losses) * SEQUENCES * LENGTH / run.train_s
            now = f"loss {run.losses[-1]:.3f}  {tokens_per_s:,.0f} tokens/s"
            progress.update(bar, completed=training.done, now=now)
    run.label = run.shown.label
    run.digest = digest_of(training.model, training.optimizer)
    training.optimizer.close()
    return run


def home_of(device: object) -> str:
    """Where the model lies."""
    return "cpu" if isinstance(device, dos.VirtualDevice) else str(device)


def digest_of(model: torch.nn.Module, optimizer: dos.DOSOptimizer) -> str:
    """A digest of every bit of weights and optimizer state."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def main(
    directory: Annotated[Path, typer.Argument(help="for the checkpoints")],
    die_after: Annotated[int, typer.Option(min=1, help="so many steps")],
) -> None:
    """Train with checkpoints, and be killed in the middle of it."""
    device = torch.accelerator.current_accelerator() or dos.VirtualDevice()
    training = Training(2, device, standard_library_text(TEXT_BYTES))
    with dos.Checkpointer(directory, every=SAVE_EVERY, keep=2) as checkpointer:
        while training.done < die_after:
            training.step()
            training.save(checkpointer)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    typer.run(main)
