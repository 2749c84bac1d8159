"""Whole optimizer steps at several strides, by turns: part of `experiments.bench_gpu_update`."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch

import dos
from experiments.figures import median_and_quartiles

SUBGROUPS = 16
"""Of each model: enough for every stride to mean something."""
STRIDES: tuple[float | str, ...] = ("host", 3, 2, 1.5, 1)

# Bytes per parameter of one optimizer: 12 of state and 4 of gradients and staging in host memory;
# on the device a weight, two slots of 12 bytes over SUBGROUPS, and staging.
HOST_PARAM_BYTES, DEVICE_PARAM_BYTES = 16, 4


@dataclass
class Strided:
    """One optimizer among those that take turns, and what its steps took."""

    optimizer: dos.DOSOptimizer
    step_s: list[float] = field(default_factory=list)
    busy_s: list[dict[str, float]] = field(default_factory=list)

    def step(self, home: torch.device, counts: bool) -> None:
        """One step, until the weights are there."""
        synchronize(home)
        started_s = time.perf_counter()
        self.optimizer.step()
        synchronize(home)
        if counts:
            self.step_s.append(time.perf_counter() - started_s)
            record = self.optimizer.last_step
            assert record is not None
            self.busy_s.append(record.busy_s)


def params_that_fit(
    wanted: int, optimizers: int, host_bytes: int | None, device_bytes: int | None
) -> int:
    """How many parameters so many optimizers can have at once in half of the memory.

    None: nobody says how much there is; then the wanted number is taken.
    """
    rooms = [(host_bytes, HOST_PARAM_BYTES), (device_bytes, DEVICE_PARAM_BYTES)]
    fits = [room // 2 // (per_param * optimizers) for room, per_param in rooms if room is not None]
    return max(SUBGROUPS, min([wanted, *fits]))


def measure_steps(home: torch.device, device: Any, params: int, rounds: int) -> dict[str, Any]:
    """Steps of the same parameters at each of `STRIDES`, which take turns.

    Args:
        home: where the parameters are.
        device: as `dos.DOSConfig` takes it.
        params: bf16 parameters of each model; a multiple of `SUBGROUPS` is taken.
        rounds: that count, after one that does not.
    """
    subgroup_size = max(1, params // SUBGROUPS)
    gradient = torch.randn(subgroup_size, device=home).to(torch.bfloat16)
    with ExitStack() as cleanup:
        runs: dict[str, Strided] = {}
        for stride in STRIDES:
            model = [torch.nn.Parameter(torch.zeros_like(gradient)) for _ in range(SUBGROUPS)]
            for parameter in model:
                parameter.grad = gradient
            optimizer = dos.DOSOptimizer(
                torch.optim.AdamW(model), stride=stride, subgroup_size=subgroup_size, device=device
            )
            runs[str(stride)] = Strided(cleanup.enter_context(closing(optimizer)))
        names = list(runs)
        for done in range(rounds + 1):
            first = done % len(names)
            for name in names[first:] + names[:first]:
                runs[name].step(home, counts=done > 0)
        pinned = all(run.optimizer._engine._pools[0].slab.pinned for run in runs.values())
    return {
        "params": SUBGROUPS * subgroup_size,
        "rounds": rounds,
        "pinned": pinned,
        "strides": {name: figures_of(run, runs["host"]) for name, run in runs.items()},
    }


def figures_of(run: Strided, host: Strided) -> dict[str, Any]:
    """Times of a step, of its lanes, and against updates on the host alone within a round."""
    step_s, quartiles = median_and_quartiles(run.step_s)
    pairs = zip(host.step_s, run.step_s, strict=True)
    speedup, speedup_quartiles = median_and_quartiles([alone / ours for alone, ours in pairs])
    lanes = sorted({lane for busy in run.busy_s for lane in busy})
    busy_s = {
        lane: median_and_quartiles([busy.get(lane, 0.0) for busy in run.busy_s])[0]
        for lane in lanes
    }
    busiest = max(busy_s, key=lambda lane: busy_s[lane])
    return {
        "step_s": step_s,
        "step_quartiles_s": quartiles,
        "vs_host": speedup,
        "vs_host_quartiles": speedup_quartiles,
        "busy_s": busy_s,
        "busiest_lane": busiest,
        # 1: the step takes no longer than its busiest lane works.
        "of_busiest_lane": busy_s[busiest] / step_s,
    }


def synchronize(home: torch.device) -> None:
    """Wait for the device, if it is one."""
    if home.type != "cpu":
        torch.accelerator.synchronize(home)
