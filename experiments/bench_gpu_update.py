"""How fast the GPU updates, and whole steps: `python -m experiments.bench_gpu_update`.

On one device, in four parts, each of whose contestants take turns in one process, beginning with
another one each round. Reported are medians and quartiles; ratios are of times within a round.

update    vs_torch_fused  time of torch's fused AdamW with fp32 states, a bf16 gradient widened
                          before and the weight rounded to bf16 after it (40 bytes per parameter),
                          over that of our kernel (28)
          of_bandwidth    time of a plain copy on the device that moves 28 bytes, over ours
examine   norm and fingerprint of a bf16 gradient, in GB/s of its 2 bytes per element
link      copies to and from pinned host memory, alone and both ways at once, in GB/s
steps     `dos.DOSOptimizer.step()` at several strides, beside the work of its busiest lane; of as
          many parameters as five optimizers can have at once in half of the free memory

`--device cpu` plays all of it on the CPU and a virtual device, to see that it works; its times
mean nothing, and "device" says so. With `--json` standard output is one JSON object and nothing
else.
"""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dos.errors import ConfigError
from dos.memory import available_host_bytes
from dos.stdout import own_stdout
from experiments import gpu_rivals as rivals
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles
from experiments.gpu_steps import STRIDES, measure_steps, params_that_fit
from experiments.update_rivals import Update

REPEATS = 5
"""Runs that follow one another within a turn."""


def measure(
    device: torch.device, params: int, step_params: int, rounds: int, step_rounds: int
) -> dict[str, Any]:
    """All figures, for programs.

    Raises:
        ConfigError: there is no such device.
    """
    if device.type != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device",
            where="bench_gpu_update",
            fix="run it where torch.cuda.is_available(); --device cpu checks that it works",
        )
    updates = take_turns(rivals.updates(params, device), device, rounds)
    ours = "triton" if "triton" in updates else "torch_operations"
    figures = {
        "device": "CPU and a virtual device: the times mean nothing",
        "params": params,
        "rounds": rounds,
        "kernel": ours,
        "vs_torch_fused": ratio(updates["torch_fused"], updates[ours]),
        "of_bandwidth": ratio(updates["copy"], updates[ours]),
        "update": rates(updates, params),
        "examine": rates(take_turns(rivals.examinations(params, device), device, rounds), params),
        "link": rates(take_turns(rivals.link(params, device), device, rounds), params),
    }
    del updates
    gc.collect()
    free_bytes = None
    if device.type != "cpu":
        figures["device"] = torch.cuda.get_device_name(device)
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(device)[0]
    fits = params_that_fit(step_params, len(STRIDES), available_host_bytes(), free_bytes)
    backend = "virtual" if device.type == "cpu" else device
    steps = measure_steps(device, backend, fits, step_rounds)
    return {**figures, "steps": steps, "environment": environment()}


def take_turns(updates: dict[str, Update], device: torch.device, rounds: int) -> dict[str, Update]:
    """Run each once per round, after one round that does not count; returns them."""
    names = list(updates)
    for done in range(rounds + 1):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            time_s = rivals.seconds_of(updates[name].run, device, REPEATS)
            if done:
                updates[name].times_s.append(time_s)
    return updates


def ratio(other: Update, ours: Update) -> dict[str, Any]:
    """Time of another over ours within a round."""
    pairs = zip(other.times_s, ours.times_s, strict=True)
    median, quartiles = median_and_quartiles([theirs_s / ours_s for theirs_s, ours_s in pairs])
    return {"median": median, "quartiles": quartiles}


def rates(updates: dict[str, Update], params: int) -> dict[str, dict[str, Any]]:
    """Times and what follows from them, by name."""
    found = {}
    for name, update in updates.items():
        time_s, quartiles_s = median_and_quartiles(update.times_s)
        found[name] = {
            "time_s": time_s,
            "quartiles_s": quartiles_s,
            "gparams_per_s": params / time_s / 1e9,
            "gbytes_per_s": params * update.param_bytes / time_s / 1e9,
            "param_bytes": update.param_bytes,
        }
    return found


def table_of(figures: dict[str, Any]) -> Table:
    """The figures, for people."""
    table = Table(title=figures["device"])
    for column in ("part", "what", "ms", "GB/s", "busiest lane", "of it"):
        table.add_column(column, justify="right")
    for part in ("update", "examine", "link"):
        for name, found in figures[part].items():
            rate = f"{found['gbytes_per_s']:.1f}"
            table.add_row(part, name, f"{found['time_s'] * 1e3:.3f}", rate)
    for stride, found in figures["steps"]["strides"].items():
        time = f"{found['step_s'] * 1e3:.1f}"
        of_lane = f"{found['of_busiest_lane']:.2f}"
        table.add_row("step", f"stride {stride}", time, "", found["busiest_lane"], of_lane)
    return table


def main(
    params: Annotated[int, typer.Option(min=1, help="parameters")] = 100_000_000,
    step_params: Annotated[int, typer.Option(min=1, help="of a whole step")] = 1_000_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 20,
    step_rounds: Annotated[int, typer.Option(min=1, help="of whole steps")] = 10,
    device: Annotated[str, typer.Option(help="a CUDA device, or cpu")] = "cuda",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time the GPU's update against its rivals and its bound, the link, and whole steps."""
    with own_stdout() as stdout:
        try:
            figures = measure(torch.device(device), params, step_params, rounds, step_rounds)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        Console(stderr=True).print(table_of(figures))
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
