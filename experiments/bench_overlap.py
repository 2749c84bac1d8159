"""What `overlap_forward` hides behind the next forward: `python -m experiments.bench_overlap`.

An emulation from end to end: the device is a virtual one, paced like a named node, and forward and
backward of each layer last as long as their matrix products do at a stated rate. Training is real
and small, and must give the same bits with the option and without.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import dos
from dos.stdout import own_stdout
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles
from experiments.pacing import MeasuredSteps, Stretch, time_scale_for
from perfmodel.profile import H100_NODE

WIDTH = 384
LAYER_PARAMS = WIDTH * WIDTH
"""A layer is a subgroup: 144 times 1,024 parameters."""

FLOP_PER_S = 400e12
"""Assumed of the device in bf16: 2 operations per parameter and token forward, 4 backward."""

LEARNING_STEPS = 2
"""Steps that do not count: gradients are sent early, and the order of use is known, after them."""


class _Paced(torch.autograd.Function):
    """Lasts a while, forward and twice as long backward, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lasts_s: float) -> torch.Tensor:
        ctx.lasts_s = lasts_s
        time.sleep(lasts_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.lasts_s)
        return grad, None


class PacedLayer(torch.nn.Linear):
    """A linear layer that takes `lasts_s` in real time, once its weight is there."""

    def __init__(self, lasts_s: float) -> None:
        super().__init__(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.lasts_s = lasts_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of shape (rows, WIDTH), by the weight."""
        paced: torch.Tensor = _Paced.apply(super().forward(x), self.lasts_s)  # type: ignore[no-untyped-call]
        return paced


def train(
    overlap_forward: bool, layers: int, tokens: int, steps: int, scale: float, trace: Path | None
) -> tuple[dict[str, Any], list[bytes]]:
    """Figures of a run, times in seconds of the emulated node, and the bits that it ends with."""
    torch.manual_seed(0)
    layer_s = 2 * LAYER_PARAMS * tokens / FLOP_PER_S
    model = torch.nn.Sequential(*(PacedLayer(layer_s * scale) for _ in range(layers)))
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        subgroup_size=LAYER_PARAMS,
        device=dos.VirtualDevice(pace=H100_NODE, time_scale=scale),
        overlap_forward=overlap_forward,
    )
    measured, begins_s = MeasuredSteps(), []
    for step in range(LEARNING_STEPS + steps + 1):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        begins_s.append(time.perf_counter())
        loss = model(x.to(torch.bfloat16)).float().square().mean()
        loss.backward()
        if step > LEARNING_STEPS:  # the step before is over: backward waits for it
            assert optimizer.last_step is not None
            measured.add(optimizer.last_step)
        elif step == LEARNING_STEPS and trace is not None:
            optimizer.record_trace(trace, steps=2)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    lasted_s = [end_s - begin_s for begin_s, end_s in pairwise(begins_s)]
    iterations_s = [time_s / scale for time_s in lasted_s[LEARNING_STEPS:]]
    median_s, quartiles_s = median_and_quartiles(iterations_s)
    figures = {
        "stride": optimizer.plan.stride,
        "label": measured.median_step().label,
        "iteration_s": median_s,
        "iteration_quartiles_s": quartiles_s,
        "update_s": measured.step_s,
        "exposed_s": statistics.median(
            its.exposed_s for its in measured.counted or [measured.median_step()]
        ),
        "steps": steps,
        "steps_left_out": measured.left_out,
        "void": measured.void,
    }
    optimizer.close()
    return figures, [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def table_of(figures: dict[str, Any]) -> Table:
    """The figures, for people."""
    title = "{layers} layers, {tokens:,} tokens, forward {forward_s:.3g} s; {label}: an emulation"
    table = Table(title=title.format(**figures))
    for column in ("overlap_forward", "iteration (ms)", "update (ms)", "held by it (ms)"):
        table.add_column(column, justify="right")
    for name in ("off", "on"):
        run = figures[name]
        times_s = (run["iteration_s"], run["update_s"], run["exposed_s"])
        table.add_row(name, *(f"{time_s * 1e3:.3f}" for time_s in times_s))
    return table


def main(
    layers: Annotated[int, typer.Option(min=2, help="layers, each a subgroup")] = 24,
    tokens: Annotated[int, typer.Option(min=1, help="tokens per step")] = 65_536,
    steps: Annotated[int, typer.Option(min=1, help="steps that count")] = 20,
    stretch: Stretch = 1.0,
    as_json: AsJson = False,
    output: Output = None,
    trace: Annotated[Path | None, typer.Option(help="file for the trace of two steps")] = None,
) -> None:
    """Compare steps that overlap the next forward with steps that do not."""
    with own_stdout() as stdout:
        scale = stretch * time_scale_for(H100_NODE, LAYER_PARAMS)
        off, bits = train(False, layers, tokens, steps, scale, None)
        on, its_bits = train(True, layers, tokens, steps, scale, trace)
        figures = {
            "label": off["label"],
            "emulation": True,
            "time_scale": scale,
            "layers": layers,
            "layer_params": LAYER_PARAMS,
            "tokens": tokens,
            "forward_s": layers * 2 * LAYER_PARAMS * tokens / FLOP_PER_S,
            "flop_per_s_assumed": FLOP_PER_S,
            "off": off,
            "on": on,
            "hidden_share": 1.0 - on["exposed_s"] / off["exposed_s"],
            "same_bits": bits == its_bits,
            "environment": environment(),
        }
        Console(stderr=True, width=100).print(table_of(figures))
        hand_over(figures, stdout, as_json=as_json, output=output)
    raise typer.Exit(0 if figures["same_bits"] else 1)


if __name__ == "__main__":
    typer.run(main)
