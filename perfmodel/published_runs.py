"""Published step times, the machines that they are of, and what the model says to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dos.errors import ConfigError
from perfmodel.profile import FUSED_BYTES_PER_PARAM, NodeProfile, PublishedCode
from perfmodel.published import Schedule, simulate_published


class Parameter(NamedTuple):
    """A figure to fit, in its unit: what is physically possible, and what would be usual.

    `spread` is how far a usual value strays, in natural logarithms: a weak pull, by which what the
    rows do not tell stays where it makes sense.
    """

    low: float
    high: float
    usual: float
    spread: float


class Machine(NamedTuple):
    """What is known of a machine of the published measurements; `streams` lists what may be."""

    name: str
    parameters: Mapping[str, Parameter]
    device_params_per_s: float
    casts: bool
    streams: tuple[int, ...]
    tail: str


_HOST = {
    "host_params_per_s": Parameter(0.4e9, 6e9, 1.5e9, 0.7),
    # p, m, v and the gradient read, p, m, v written; twice that if it were done in two sweeps.
    "host_bytes_per_param": Parameter(28.0, 56.0, 33.0, 0.15),
    "cast_s_per_param": Parameter(0.02e-9, 1e-9, 0.2e-9, 1.0),
    "launch_s": Parameter(1e-5, 5e-3, 5e-4, 1.0),
}

MACHINES = {
    "a100": Machine(
        "one rank of 4x A100 40 GB, PCIe 4, 14 logical CPUs",
        {
            **_HOST,
            "link_bytes_per_s": Parameter(10e9, 32e9, 24e9, 0.15),
            "host_memory_bytes_per_s": Parameter(15e9, 100e9, 40e9, 0.7),
        },
        device_params_per_s=44e9,
        casts=False,
        streams=(1,),
        tail="if_ragged",
    ),
    "h100": Machine(
        "one rank of 4x H100 80 GB, PCIe 5, 46 logical CPUs",
        {
            **_HOST,
            "link_bytes_per_s": Parameter(20e9, 55.2e9, 45e9, 0.2),
            "host_memory_bytes_per_s": Parameter(40e9, 250e9, 100e9, 0.7),
            "device_params_per_s": Parameter(10e9, 95e9, 40e9, 0.5),
        },
        device_params_per_s=80e9,
        casts=True,
        streams=(1, 3),
        tail="never",
    ),
}
"""The machines of the published rows, and how their code's versions differed."""


class Row(NamedTuple):
    """One published measurement."""

    machine: str
    model: str
    numels: tuple[int, ...]
    schedule: Schedule
    stride: int | None
    resident_ratio: str
    step_s: float

    @property
    def case(self) -> tuple[object, ...]:
        """All but the time: repeats share it."""
        return self[2:6]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file like `experiments/data/paper_runs.json` that are meant for fitting.

    Raises:
        ConfigError: no such file, or no row in it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = [_row(each) for each in content["rows"] if each.get("fit", True)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no published runs: {type(error).__name__}: {error}",
            where=str(path),
            fix="give a file like experiments/data/paper_runs.json",
        ) from None
    return rows


def _row(each: Mapping[str, Any]) -> Row:
    offloaded = each["ratio"]
    schedule: Schedule = "dos-paper" if each["prefetch"] else "zero-offload"
    if schedule == "zero-offload" and offloaded < 1:
        schedule = "twin-flow"
    return Row(
        machine=each["machine"],
        model=f"{each['model_B']:g}B",
        numels=tuple(each["subgroup_numel"]),
        schedule=schedule,
        stride=each["k"] if each["prefetch"] else None,
        resident_ratio=f"{1 - offloaded:.6g}",
        step_s=each["step_ms"] / 1e3,
    )


def profile_from(
    machine: Machine, figures: Mapping[str, float], streams: int, *, source: str
) -> NodeProfile:
    """A node's profile from fitted figures.

    This library's own host update is taken to move as many bytes per second as the published
    one does alone; its device update and cost per op are assumed.
    """
    link, memory = figures["link_bytes_per_s"], figures["host_memory_bytes_per_s"]
    moved = figures["host_params_per_s"] * figures["host_bytes_per_param"]
    return NodeProfile(
        name=machine.name,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_params_per_s=round(min(moved, memory) / FUSED_BYTES_PER_PARAM),
        device_params_per_s=machine.device_params_per_s,
        launch_s=10e-6,
        source=source,
        host_memory_bytes_per_s=memory,
        published=PublishedCode(
            host_params_per_s=figures["host_params_per_s"],
            host_bytes_per_param=figures["host_bytes_per_param"],
            cast_s_per_param=figures["cast_s_per_param"],
            launch_s=figures["launch_s"],
            casts=machine.casts,
            streams=streams,
            tail=machine.tail,
            device_params_per_s=figures.get("device_params_per_s"),
        ),
    )


def predict_row(profile: NodeProfile, row: Row) -> float:
    """Seconds that the model gives a published row."""
    _, seconds = simulate_published(
        profile,
        row.numels,
        schedule=row.schedule,
        stride=row.stride,
        resident_ratio=row.resident_ratio,
    )
    return seconds
