"""Where an iteration's time goes, emulated: `python -m experiments.bench_phases`.

Three ways to train the same layers on the virtual device, paced like one rank of an H100 node,
forward and backward lasting as long as their matrix products do at a stated rate:

plain        gradients go to the host in the step, which updates all of it there
flush        they go while backward runs; the step updates all on the host
interleaved  the same, and the step is interleaved at the stride that the model chooses

An emulation: nothing in it is a GPU's time. With `--json` standard output is one JSON object and
nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Annotated, Any

import torch
import typer

import dos
from dos.stdout import own_stdout
from experiments.bench_overlap import FLOP_PER_S, LAYER_PARAMS, LEARNING_STEPS, WIDTH, PacedLayer
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles
from experiments.pacing import MeasuredSteps, Stretch, time_scale_for
from perfmodel.profile import H100_NODE

SCHEDULES = {"plain": "host", "flush": "host", "interleaved": "auto"}
PHASES = ("forward", "backward", "step")


def train(schedule: str, layers: int, tokens: int, steps: int, scale: float) -> dict[str, Any]:
    """Seconds of the emulated node in each phase, medians of the steps that count."""
    torch.manual_seed(0)
    layer_s = 2 * LAYER_PARAMS * tokens / FLOP_PER_S
    model = torch.nn.Sequential(*(PacedLayer(layer_s * scale) for _ in range(layers)))
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        stride=SCHEDULES[schedule],
        subgroup_size=LAYER_PARAMS,
        device=dos.VirtualDevice(pace=H100_NODE, time_scale=scale),
    )
    measured = MeasuredSteps()
    counted: list[list[float]] = []
    latest: list[float] = []
    for step in range(LEARNING_STEPS + steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        times_s = [time.perf_counter()]
        loss = model(x.to(torch.bfloat16)).float().square().mean()
        times_s.append(time.perf_counter())
        if schedule == "plain":  # assigned by hand, so that no hook sends them
            parameters = list(model.parameters())
            for parameter, grad in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = grad
        else:
            loss.backward()
        times_s.append(time.perf_counter())
        optimizer.step()
        times_s.append(time.perf_counter())
        optimizer.zero_grad()
        assert optimizer.last_step is not None
        if step >= LEARNING_STEPS:
            measured.add(optimizer.last_step)
            latest = [(end_s - begin_s) / scale for begin_s, end_s in pairwise(times_s)]
            if not optimizer.last_step.overran:
                counted.append(latest)
    optimizer.close()
    found: dict[str, Any] = {"stride": measured.median_step().stride}
    for phase, each_s in zip(PHASES, zip(*(counted or [latest]), strict=True), strict=True):
        found[f"{phase}_s"], found[f"{phase}_quartiles_s"] = median_and_quartiles(each_s)
    return {**found, "steps_left_out": measured.left_out, "void": measured.void}


def main(
    layers: Annotated[int, typer.Option(min=2, help="layers, each a subgroup")] = 24,
    tokens: Annotated[int, typer.Option(min=1, help="tokens per step")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="steps that count")] = 12,
    stretch: Stretch = 2.0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time the phases of an iteration under three schedules."""
    with own_stdout() as stdout:
        scale = stretch * time_scale_for(H100_NODE, LAYER_PARAMS)
        figures = {
            "label": "virtual device paced like " + H100_NODE.name,
            "virtual": True,
            "time_scale": scale,
            "params": layers * LAYER_PARAMS,
            "tokens": tokens,
            "flop_per_s_assumed": FLOP_PER_S,
            "steps": steps,
            "schedules": {name: train(name, layers, tokens, steps, scale) for name in SCHEDULES},
            "environment": environment(),
        }
        print(json.dumps(figures["schedules"], indent=1), file=sys.stderr)
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
