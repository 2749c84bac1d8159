"""The model against paced steps: `python -m experiments.bench_model`.

Random plans run on the virtual device, paced with the rates of a profile in real time, and in the
model with the same rates. What the model has beyond a pace (sharing) is left out of the profile, so
that this judges the simulation of lanes, waits and slots, and the interpreter that carries them
out. An emulation: nothing here is a GPU's time. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping

import torch

import dos
from dos.stdout import own_stdout
from experiments.figures import environment, median_and_quartiles
from experiments.pacing import MeasuredSteps, time_scale_for
from perfmodel.profile import H100_NODE
from perfmodel.timeline import simulate, step_s

SUBGROUP_SIZE = 128 * 1024
STEPS = 5
SLACK = 8.0
"""Beyond the time scale at which a slot just suffices: other work shares the cores."""


def random_options(draw: random.Random) -> dict[str, object]:
    """Options of one plan: from all on the host to all on the device."""
    return {
        "stride": draw.choice(["host", *(round(draw.uniform(1, 5), 2) for _ in range(4))]),
        "resident_ratio": draw.choice([0.0, 0.2, 0.5]),
        "device_slots": draw.randint(1, 3),
    }


def measure(
    options: Mapping[str, object], subgroups: int, scale: float
) -> tuple[MeasuredSteps, float]:
    """A few paced steps of a plan, and the seconds that the model gives it."""
    parameter = torch.nn.Parameter(torch.zeros(subgroups * SUBGROUP_SIZE, dtype=torch.bfloat16))
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW([parameter]),
        subgroup_size=SUBGROUP_SIZE,
        device=dos.VirtualDevice(pace=H100_NODE, time_scale=scale),
        **options,
    )
    steps = MeasuredSteps()
    for _ in range(STEPS):
        parameter.grad = torch.ones_like(parameter)  # by hand, so that the step sends it
        optimizer.step()
        assert optimizer.last_step is not None
        steps.add(optimizer.last_step)
    assert steps.latest is not None
    predicted_s = step_s(simulate(steps.latest.plan, H100_NODE))
    optimizer.close()
    return steps, predicted_s


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with own_stdout() as stdout:
        scale = SLACK * time_scale_for(H100_NODE, SUBGROUP_SIZE)
        plans: list[dict[str, object]] = []
        sound: list[float] = []  # a measurement that lost too many steps says nothing
        for number in range(arguments.plans):
            options, subgroups = random_options(draw), draw.randint(2, 16)
            steps, predicted_s = measure(options, subgroups, scale)
            off = steps.step_s / predicted_s - 1
            plans.append({**options, "subgroups": subgroups, "off": off, "void": steps.void})
            if not steps.void:
                sound.append(abs(off))
            print(f"plan {number}: {off:+.1%}, {options}", file=sys.stderr)
        median, quartiles = median_and_quartiles(sound) if sound else (None, None)
        result = {
            "label": "virtual device paced like " + H100_NODE.name,
            "time_scale": scale,
            "void": len(plans) - len(sound),
            "median_off": median,
            "quartiles": quartiles,
            "most_off": max(sound, default=None),
            "plans": plans,
            "environment": environment(),
        }
        stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
