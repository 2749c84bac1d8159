"""`python -m perfmodel predict`, `simulate` and `plot`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from dos.errors import ConfigError
from dos.stdout import own_stdout
from dos.trace import write_trace
from perfmodel import options as o
from perfmodel.at_scale import Network, collectives
from perfmodel.prediction import AnySchedule, Prediction, Request, numels_of
from perfmodel.prediction import predict as ask
from perfmodel.profile import NodeProfile
from perfmodel.published import Schedule
from perfmodel.report import plot_sweep, plot_timeline

SCHEDULES: tuple[AnySchedule, ...] = ("dos", *get_args(Schedule))
SWEEP = ("host", *(f"{k / 4:g}" for k in range(4, 13)), "4", "5", "6", "8", "10")
PAPER_SWEEP = tuple(map(str, range(2, 11)))


def predict(
    profile: o.ProfilePath,
    params: Annotated[
        int | None, typer.Option("--params-per-rank", min=1, help="parameters of one rank")
    ] = None,
    subgroup_size: o.SubgroupSize = 100_000_000,
    subgroups_file: o.Subgroups = None,
    schedule: o.ScheduleName = "dos",
    stride: o.Stride = None,
    device_slots: o.Slots = None,
    resident_ratio: o.Residents = 0.0,
    gradients_in_step: o.GradientsInStep = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="ZeRO-3 over so many nodes")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    total_params: Annotated[
        int | None, typer.Option("--params", min=1, help="of the whole model, with --nodes")
    ] = None,
    link_profile: Annotated[
        Path | None, typer.Option(help="the network, a JSON object; with --nodes")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """How long one optimizer step takes; with --nodes also what an iteration sends between GPUs."""
    with own_stdout() as stdout:
        node = NodeProfile.load(profile)
        over, sent = _over_nodes(nodes, gpus_per_node, total_params, link_profile)
        given = [n for n in (params, over) if n is not None]
        if len(given) != 1:
            raise ConfigError(
                "the parameters of one rank are given once",
                where="--params-per-rank",
                fix="give it, or --nodes with --params and --link-profile",
            )
        asked = _request(
            numels_of(given[0], subgroup_size, subgroups_file),
            schedule,
            stride,
            device_slots,
            resident_ratio,
            gradients_in_step,
        )
        answer = ask(node, asked)
        figures = {**_figures(node, asked, answer), "params_per_rank": given[0], **sent}
        rows = [(name, _shown(value)) for name, value in figures.items() if name != "source"]
        o.say(
            stdout,
            as_json=as_json,
            figures=figures,
            tables=[o.table_of(f"predicted: {schedule} on {node.name}", ("", ""), rows)],
            lines=[f"rates: {node.source}"],
        )


def simulate(
    profile: o.ProfilePath,
    params: o.Params,
    subgroup_size: o.SubgroupSize = 100_000_000,
    subgroups_file: o.Subgroups = None,
    schedule: o.ScheduleName = "dos",
    stride: o.Stride = None,
    device_slots: o.Slots = None,
    resident_ratio: o.Residents = 0.0,
    gradients_in_step: o.GradientsInStep = False,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write, for Perfetto")] = None,
    plot: Annotated[Path | None, typer.Option(help="picture to write, a PNG")] = None,
    as_json: o.Json = False,
) -> None:
    """Every op of one step: when it starts and ends, as a trace and picture of a real step."""
    with own_stdout() as stdout:
        o.check_writable(trace, plot)
        node = NodeProfile.load(profile)
        asked = _request(
            numels_of(params, subgroup_size, subgroups_file),
            schedule,
            stride,
            device_slots,
            resident_ratio,
            gradients_in_step,
        )
        answer = ask(node, asked)
        label = f"simulation of {node.name}"
        if trace is not None:
            plans = {} if answer.plan is None else {"plan 0": str(answer.plan)}
            write_trace(answer.spans, trace, process=label, notes=plans)
        if plot is not None:
            heading = f"{schedule}, stride {answer.stride}: {answer.step_s * 1e3:.0f} ms"
            plot_timeline({heading: answer.spans}, plot, title=label)
        ops = [
            {"name": s.name, "lane": s.lane, "start_s": s.start_s, "end_s": s.end_s}
            for s in answer.spans
        ]
        rows = [(s.name, s.lane, _ms(s.start_s), _ms(s.end_s)) for s in answer.spans]
        o.say(
            stdout,
            as_json=as_json,
            figures={**_figures(node, asked, answer), "ops": ops},
            tables=[o.table_of(label, ("op", "lane", "start (ms)", "end (ms)"), rows)],
            lines=[f"step {_ms(answer.step_s)} ms", f"rates: {node.source}"],
        )


def plot(
    profile: o.ProfilePath,
    params: o.Params,
    output: Annotated[Path, typer.Option("-o", "--output", help="picture to write, a PNG")],
    subgroup_size: o.SubgroupSize = 100_000_000,
    subgroups_file: o.Subgroups = None,
    as_json: o.Json = False,
) -> None:
    """The predicted step over the stride, as a picture."""
    with own_stdout() as stdout:
        o.check_writable(output)
        node = NodeProfile.load(profile)
        numels = numels_of(params, subgroup_size, subgroups_file)
        curves: dict[str, dict[str, float]] = {"dos": {}}
        for stride in SWEEP if node.has_device else ("host",):
            curves["dos"][stride] = ask(node, Request(numels, stride=stride)).step_s
        if node.published is not None:
            curves["dos-paper"] = {
                k: ask(node, Request(numels, "dos-paper", k)).step_s for k in PAPER_SWEEP
            }
        plot_sweep(curves, output, title=f"predicted step on {node.name}")
        rows = [
            (name, stride, _ms(seconds))
            for name, curve in curves.items()
            for stride, seconds in curve.items()
        ]
        o.say(
            stdout,
            as_json=as_json,
            figures={"step_s": curves, "written": str(output), "source": node.source},
            tables=[o.table_of(f"{node.name}", ("schedule", "stride", "step (ms)"), rows)],
            lines=[f"written to {output}"],
        )


def _over_nodes(
    nodes: int | None, gpus_per_node: int, params: int | None, link_profile: Path | None
) -> tuple[int | None, dict[str, float]]:
    """Parameters of one rank, and what it sends in an iteration; neither without nodes."""
    given = (nodes, params, link_profile)
    if given == (None, None, None):
        return None, {}
    if nodes is None or params is None or link_profile is None:
        raise ConfigError(
            "several nodes need the whole model and a network",
            where="--nodes, --params, --link-profile",
            fix="give all three of them, or --params-per-rank alone",
        )
    found = collectives(Network.load(link_profile), params, nodes, gpus_per_node)
    return -(-params // (nodes * gpus_per_node)), asdict(found)


def _request(
    numels: list[int],
    schedule: str,
    stride: str | None,
    slots: int | None,
    resident_ratio: float,
    gradients_in_step: bool,
) -> Request:
    known = next((each for each in SCHEDULES if each == schedule), None)
    if known is None:
        raise ConfigError(
            f"{schedule!r} is no schedule", where="--schedule", fix=f"one of {', '.join(SCHEDULES)}"
        )
    if stride is not None and known in ("zero-offload", "twin-flow"):
        typer.echo(f"{known} has no stride: {stride} is ignored", err=True)
    return Request(numels, known, stride, slots, str(resident_ratio), not gradients_in_step)


def _figures(node: NodeProfile, asked: Request, answer: Prediction) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "step_s": answer.step_s,
        "schedule": asked.schedule,
        "stride": answer.stride,
        "subgroups": len(asked.numels),
    }
    if answer.memory is not None:
        figures |= {
            "closed_form_s": answer.closed_form_s,
            "busy": answer.busy,
            "host_bytes": answer.memory.host_bytes,
            "device_bytes": answer.memory.device_bytes,
        }
    return figures | {"source": node.source}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {share:.0%}" for name, share in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
