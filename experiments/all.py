"""Measures everything that the pictures and tables are of: `python -m experiments.all --dir D`.

One after the other, each in a process of its own, while nothing else should run: about an hour on
two cores. Numbers go to experiments/results, with the machine they are of; what fails keeps its old
file, is told, and makes the exit code 1. `make figures` draws the pictures afterwards.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.evidence import MEASUREMENTS, RESULTS, MeasurementError, measured
from experiments.figures import environment

PATIENCE = 4
"""A measurement that takes this many times what it should is given up."""


def keep(name: str, directory: Path, results: Path) -> None:
    """Measure one and write its file.

    Raises:
        MeasurementError: there are no numbers; the file is as it was.
    """
    its = MEASUREMENTS[name]
    arguments = [*its.command, *its.options]
    if its.on_disk:
        arguments += ["--dir", str(directory)]
    figures = measured(arguments, PATIENCE * 60 * its.minutes)
    figures.setdefault("environment", environment(directory if its.on_disk else None))
    (results / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="of these only")] = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="on the disk to measure; 3 GiB are needed")
    ] = Path("build/bench"),
    results: Annotated[Path, typer.Option(help="folder of the numbers")] = RESULTS,
) -> None:
    """Measure everything, or what is named."""
    unknown = set(names or ()) - set(MEASUREMENTS)
    if unknown:
        raise typer.BadParameter(f"no {', '.join(unknown)}; one of {', '.join(MEASUREMENTS)}")
    directory.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names or MEASUREMENTS:
        its = MEASUREMENTS[name]
        if its.on_gpu and not torch.cuda.is_available():
            print(f"{name}: left out, there is no GPU", file=sys.stderr)
            continue
        print(f"{name}: about {its.minutes:g} minutes", file=sys.stderr)
        begun_s = time.monotonic()
        try:
            keep(name, directory, results)
        except MeasurementError as error:
            failed.append(name)
            print(f"{name}: no numbers: {error}", file=sys.stderr)
        print(f"{name}: {(time.monotonic() - begun_s) / 60:.1f} minutes", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
