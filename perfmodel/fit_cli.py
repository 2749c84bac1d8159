"""`python -m perfmodel fit` and `compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from dos.stdout import own_stdout
from perfmodel import options as o
from perfmodel.comparison import compare as put_beside
from perfmodel.profile import NodeProfile
from perfmodel.published_runs import read_rows
from perfmodel.report import plot_timeline


def fit(
    rows: Annotated[Path, typer.Option(help="published step times, a JSON file")],
    machine: Annotated[str, typer.Option(help="h100 or a100")],
    output: Annotated[Path, typer.Option("-o", "--output", help="profile to write")],
    report: Annotated[
        Path | None, typer.Option(help="JSON file to write: errors, intervals, equally good fits")
    ] = None,
    starts: Annotated[int, typer.Option(min=1, help="how many optima to look for")] = 8,
    as_json: o.Json = False,
) -> None:
    """Find a node's profile from published step times, in some minutes; needs scipy."""
    with own_stdout() as stdout:
        from perfmodel.fit import fit as search

        o.check_writable(output, report)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=1.0)
            found = search(
                machine,
                read_rows(rows),
                starts=starts,
                progress=lambda stage, share: progress.update(
                    task, description=stage, completed=share
                ),
            )
        found.profile.save(output)
        figures = found.report()
        if report is not None:
            report.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        pinned = [(name, *(f"{x:.4g}" for x in span)) for name, span in found.pinned.items()]
        errors = [(name, f"{error:.1%}") for name, error in found.left_out.items()]
        o.say(
            stdout,
            as_json=as_json,
            figures=figures,
            tables=[
                o.table_of("among equally good fits", ("figure", "least", "most"), pinned),
                o.table_of("mean error where left out", ("", "error"), errors),
            ],
            lines=[
                f"mean error {found.mean_error():.1%} of {len(found.errors)} rows",
                f"written to {output}",
            ],
        )


def compare(
    profile: o.ProfilePath,
    trace: Annotated[Path, typer.Option(help="a step as optimizer.record_trace wrote it")],
    step: Annotated[int, typer.Option(min=0, help="which step of the trace")] = 0,
    plot: Annotated[Path | None, typer.Option(help="picture to write, a PNG")] = None,
    as_json: o.Json = False,
) -> None:
    """A recorded step beside its prediction, op by op."""
    with own_stdout() as stdout:
        o.check_writable(plot)
        node = NodeProfile.load(profile)
        found = put_beside(node, trace, step=step)
        if plot is not None:
            pair = {
                f"measured, {found.label}": found.measured,
                f"predicted, {node.name}": found.predicted,
            }
            plot_timeline(pair, plot, title=f"step {step} of {trace.name}")
        ops = [
            {
                "name": real.name,
                "lane": real.lane,
                "measured_start_s": real.start_s,
                "measured_s": real.end_s - real.start_s,
                "predicted_start_s": model.start_s,
                "predicted_s": model.end_s - model.start_s,
            }
            for real, model in zip(found.measured, found.predicted, strict=True)
        ]
        keys = ("measured_start_s", "predicted_start_s", "measured_s", "predicted_s")
        rows = [(op["name"], *(f"{float(str(op[key])) * 1e3:.3f}" for key in keys)) for op in ops]
        kinds = [
            (kind, *(f"{seconds * 1e3:.3f}" for seconds in pair))
            for kind, pair in found.by_kind().items()
        ]
        o.say(
            stdout,
            as_json=as_json,
            figures={
                "measured_s": found.measured_s,
                "predicted_s": found.predicted_s,
                "by_kind_s": found.by_kind(),
                "ops": ops,
                "measured_on": found.label,
                "source": node.source,
            },
            tables=[
                o.table_of(
                    "op by op (ms)",
                    ("op", "starts", "predicted", "takes", "predicted"),
                    rows,
                ),
                o.table_of("work (ms)", ("kind", "measured", "predicted"), kinds),
            ],
            lines=[
                f"step: measured {found.measured_s * 1e3:.3f} ms on {found.label}, "
                f"predicted {found.predicted_s * 1e3:.3f} ms",
                f"rates: {node.source}",
            ],
        )
