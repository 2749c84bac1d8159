"""Update throughput over strides and residents, emulated: `python -m experiments.bench_sweep`.

Steps on the virtual device, paced like one rank of an H100 node, beside what the model says of
the same plans. An emulation: it shows whether lanes overlap as the model says, not what a GPU does.
Residents at stride "host" are the share that Twin-Flow keeps on the GPU. With `--json` standard
output is one JSON object and nothing else.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dos.stdout import own_stdout
from experiments.bench_model import SUBGROUP_SIZE, measure
from experiments.figures import AsJson, Output, environment, hand_over
from experiments.pacing import Stretch, time_scale_for
from perfmodel.profile import H100_NODE

STRIDES: tuple[float | str, ...] = ("host", 10, 8, 6, 4, 3, 2.5, 2, 1.5, 1.25, 1)
RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8)
INTERLEAVED: tuple[float | str, ...] = ("host", 2, 1.5)
"""Strides that are tried at every ratio: Twin-Flow, the published one, about the model's choice."""


def point(stride: float | str, ratio: float, subgroups: int, scale: float) -> dict[str, Any]:
    """Measured and predicted parameters per second of the emulated node."""
    options = {"stride": stride, "resident_ratio": ratio}
    steps, predicted_s = measure(options, subgroups, scale)
    params = subgroups * SUBGROUP_SIZE
    found = {
        **options,
        "params_per_s": params / steps.step_s,
        "predicted_params_per_s": params / predicted_s,
        "void": steps.void,
    }
    print(found, file=sys.stderr)
    return found


def main(
    subgroups: Annotated[int, typer.Option(min=1, help="of each step")] = 12,
    stretch: Stretch = 4.0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Sweep strides and residents on a paced virtual device."""
    with own_stdout() as stdout:
        scale = stretch * time_scale_for(H100_NODE, SUBGROUP_SIZE)
        swept = [(stride, 0.0) for stride in STRIDES]
        swept += [(stride, ratio) for stride in INTERLEAVED for ratio in RATIOS if ratio]
        figures = {
            "label": "virtual device paced like " + H100_NODE.name,
            "virtual": True,
            "time_scale": scale,
            "subgroups": subgroups,
            "subgroup_size": SUBGROUP_SIZE,
            "points": [point(stride, ratio, subgroups, scale) for stride, ratio in swept],
            "environment": environment(),
        }
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
