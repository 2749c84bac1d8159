"""Options that several commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from dos.errors import ConfigError

GIB = 2**30
MOST_GIB = 2.0**30

ProfilePath = Annotated[
    Path, typer.Option("--profile", help="a node, as calibrate or fit wrote it")
]
Params = Annotated[int, typer.Option("--params-per-rank", min=1, help="parameters of one rank")]
SubgroupSize = Annotated[int, typer.Option(min=1, help="parameters per subgroup")]
Subgroups = Annotated[
    Path | None,
    typer.Option("--subgroups-file", help="a JSON list: the size of each subgroup, in order"),
]
ScheduleName = Annotated[
    str, typer.Option("--schedule", help="dos, dos-paper, zero-offload or twin-flow")
]
Stride = Annotated[
    str | None, typer.Option(help='k, or "host"; without it, the best of schedule dos')
]
Slots = Annotated[
    int | None, typer.Option("--device-slots", min=1, help="staging slots on the device; dos has 2")
]
Residents = Annotated[
    float, typer.Option("--resident-ratio", min=0.0, max=1.0, help="share that stays on the device")
]
GradientsInStep = Annotated[
    bool, typer.Option("--gradients-in-step", help="send them in the step, not during backward")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object")]


def check_writable(*paths: Path | None) -> None:
    """Refuse what could not be written, before time is spent on it; None is not to be.

    Raises:
        ConfigError: names the path.
    """
    for path in paths:
        if path is None:
            continue
        parent = path.absolute().parent
        if path.is_dir() or not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise ConfigError(
                "cannot be written",
                where=str(path),
                fix="give a file in a folder that is there and may be written to",
            )


def say(
    stdout: TextIO,
    *,
    as_json: bool,
    figures: Mapping[str, Any],
    tables: Iterable[Table] = (),
    lines: Sequence[str] = (),
) -> None:
    """Print figures for a program, or tables and lines for people."""
    if as_json:
        stdout.write(json.dumps(figures) + "\n")
        return
    console = Console(file=stdout)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row))
    return table
