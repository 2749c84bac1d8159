"""`python -m perfmodel solve` and `checkpoint-interval`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dos.errors import ConfigError
from dos.stdout import own_stdout
from perfmodel import options as o
from perfmodel.checkpoint_interval import SAVED_BYTES_PER_PARAM
from perfmodel.checkpoint_interval import checkpoint_interval as interval_of
from perfmodel.planned import planner_for
from perfmodel.profile import NodeProfile
from perfmodel.solve import USUAL, Choice, Limits, Space
from perfmodel.solve import solve as search

SHOWN = 15
"""Choices in the table; the JSON object holds all."""


def solve(
    profile: o.ProfilePath,
    params: o.Params,
    host_memory: Annotated[
        float, typer.Option(min=0.0, max=o.MOST_GIB, help="budget of this rank, GiB")
    ],
    device_memory: Annotated[
        float,
        typer.Option(
            min=0.0, max=o.MOST_GIB, help="budget beside the model, GiB; 0: without the device"
        ),
    ],
    subgroup_size: Annotated[
        list[int] | None, typer.Option(min=1, help="to choose from; may be given more than once")
    ] = None,
    gradients_in_step: o.GradientsInStep = False,
    as_json: o.Json = False,
) -> None:
    """The fastest step that fits: stride, residents, slots, subgroup size, wire; what bounds it."""
    with own_stdout() as stdout:
        node = NodeProfile.load(profile)
        limits = Limits(int(host_memory * o.GIB), int(device_memory * o.GIB))
        found = search(
            node,
            params,
            planner_for(
                params, gradients_sent=not gradients_in_step, host_parameters=not node.has_device
            ),
            limits,
            Space(subgroup_size) if subgroup_size else USUAL,
        )
        figures = {
            "best": _figures(found.best),
            "bound": found.bound,
            "busy": found.busy,
            "gains": found.gains,
            "choices": [_figures(choice) for choice in found.choices],
            "source": node.source,
        }
        columns = ("ms", "stride", "residents", "slots", "subgroup", "wire")
        memory = ("host GiB", "device GiB", "fits")
        busy = ", ".join(f"{name} {share:.0%}" for name, share in found.busy.items())
        helps = [f"{remedy}: {gain:.1%} less" for remedy, gain in found.gains.items()]
        o.say(
            stdout,
            as_json=as_json,
            figures=figures,
            tables=[
                o.table_of(
                    f"predicted on {node.name}",
                    (*columns, *memory),
                    map(_row, found.choices[:SHOWN]),
                )
            ],
            lines=[
                f"best: {found.best.step_s * 1e3:.1f} ms, bound by {found.bound}; busy: {busy}",
                f"what would help: {'; '.join(helps)}",
                f"rates: {node.source}",
            ],
        )


def _figures(choice: Choice) -> dict[str, Any]:
    figures = asdict(choice) | choice.option._asdict()
    del figures["option"]
    return figures


def _row(choice: Choice) -> tuple[object, ...]:
    option = choice.option
    return (
        f"{choice.step_s * 1e3:.1f}",
        option.stride,
        option.resident_ratio,
        option.slots,
        f"{option.subgroup_size / 1e6:g} M",
        f"{8 * option.wire_bytes} bit",
        f"{choice.host_bytes / o.GIB:.1f}",
        f"{choice.device_bytes / o.GIB:.1f}",
        "yes" if choice.fits else "no",
    )


def checkpoint_interval(
    mtbf_hours: Annotated[float, typer.Option(help="between two failures of the whole job")],
    stall_s: Annotated[float, typer.Option(help="for which a checkpoint stops training")],
    profile: Annotated[
        Path | None, typer.Option(help="a node, for the time that a checkpoint writes")
    ] = None,
    params: Annotated[
        int | None, typer.Option("--params-per-rank", min=1, help="with --profile")
    ] = None,
    restart_s: Annotated[float, typer.Option(help="from a failure until training goes on")] = 0.0,
    as_json: o.Json = False,
) -> None:
    """How often to save, by Young and Daly."""
    with own_stdout() as stdout:
        write_s = 0.0
        if (profile is None) != (params is None):
            raise ConfigError(
                "the time that a save writes takes a node and the parameters of one rank",
                where="--profile, --params-per-rank",
                fix="give both, or neither",
            )
        if profile is not None and params is not None:
            rate = NodeProfile.load(profile).rate("disk_write_bytes_per_s")
            write_s = SAVED_BYTES_PER_PARAM * params / rate
        found = interval_of(mtbf_hours * 3600, stall_s, write_s=write_s, restart_s=restart_s)
        o.say(
            stdout,
            as_json=as_json,
            figures=asdict(found),
            lines=[
                f"save every {found.interval_s:,.0f} s (Young {found.young_s:,.0f} s, "
                f"Daly {found.daly_s:,.0f} s); a save writes {found.write_s:,.1f} s",
                f"saving, repeated work and restarts: {found.waste:.2%} of the time",
            ],
        )
