"""All paired benchmarks, reduced, in one table: `python -m experiments.bench`, or `make bench`.

Each runs in a process of its own; one that fails or takes too long is told in the table and stops
nothing. Within 15 minutes. The table is on standard error; standard output is one JSON object and
nothing else. Sizes are reduced: for figures to quote see experiments/README.md.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dos.stdout import own_stdout
from experiments.bench_rows import ROWS, Row
from experiments.evidence import MEASUREMENTS, Measurement, MeasurementError, measured
from experiments.figures import environment

LIMIT_S = 15 * 60.0


def arguments_of(its: Measurement, directory: Path) -> list[str]:
    """Of the reduced form; without a GPU its benchmark is played on the processor."""
    assert its.reduced is not None
    found = [*its.command, *its.reduced]
    if its.on_disk:
        found += ["--dir", str(directory)]
    if its.on_gpu and not torch.cuda.is_available():
        found += ["--device", "cpu"]
    return found


def measure(directory: Path, limit_s: float) -> dict[str, Any]:
    """Rows and numbers of every benchmark, or why there are none."""
    ends_s = time.monotonic() + limit_s
    found: dict[str, Any] = {}
    for name, rows_of in ROWS.items():
        its = MEASUREMENTS[name]
        begun_s = time.monotonic()
        print(f"--- {name}", file=sys.stderr)
        try:
            left_s = ends_s - begun_s
            if left_s < 1:
                raise MeasurementError(f"{limit_s / 60:g} minutes were over")
            figures = measured(arguments_of(its, directory), min(its.limit_s, left_s))
            rows = [asdict(row) for row in rows_of(figures)]
            found[name] = {"rows": rows, "figures": figures}
        except MeasurementError as error:
            found[name] = {"failed": str(error)}
        found[name]["took_s"] = round(time.monotonic() - begun_s, 1)
    return {"benchmarks": found, "environment": environment(directory)}


def table_of(found: dict[str, Any]) -> Table:
    """For people."""
    table = Table(title="ratio: how many times as fast ours is; of a bound it is at most 1")
    for column in ("what", "ours", "beside", "it", "ratio", "spread", "of"):
        table.add_column(column)
    for name, its in found["benchmarks"].items():
        table.add_section()
        if "failed" in its:
            table.add_row(name, "", f"no numbers: {its['failed']}")
        for row in (Row(**each) for each in its.get("rows", ())):
            table.add_row(
                row.what,
                _figure(row.ours, row.unit),
                row.beside,
                _figure(row.other, row.unit),
                _figure(row.ratio),
                " to ".join(f"{end:.2f}" for end in row.spread or ()),
                row.note,
            )
    return table


def _figure(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.3g} {unit}".rstrip()


def main(
    directory: Annotated[
        Path, typer.Option("--dir", help="on the disk to measure; 2 GiB are needed")
    ] = Path("build/bench"),
    limit_s: Annotated[float, typer.Option(min=0.0, help="for all of them")] = LIMIT_S,
    output: Annotated[Path | None, typer.Option(help="file for the JSON object, too")] = None,
) -> None:
    """Run the paired benchmarks, reduced."""
    directory.mkdir(parents=True, exist_ok=True)
    with own_stdout() as stdout:
        found = measure(directory, limit_s)
        Console(stderr=True, width=160).print(table_of(found))
        print(json.dumps(found), file=stdout)
        if output:
            output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
