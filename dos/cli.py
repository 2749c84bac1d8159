"""The command `dos`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dos
from dos import cli_checkpoint
from dos.bench import cli as bench
from dos.config import DOSConfig
from dos.errors import ConfigError, DOSError
from dos.plan import SubgroupSize, build, partition, verify
from dos.stdout import own_stdout

if TYPE_CHECKING:
    from dos.doctor import Finding

app = typer.Typer(
    help="Deep Optimizer States: exact, interleaved optimizer updates.",
    no_args_is_help=True,
    add_completion=False,
)
cli_checkpoint.register(app)
app.add_typer(bench.app, name="bench")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(dos.__version__)


@app.command()
def plan(
    params: Annotated[int, typer.Argument(min=1, help="parameters of this rank")],
    stride: Annotated[str, typer.Option(help='a number >= 1, or "host"')] = "2",
    subgroup_size: Annotated[int, typer.Option(min=1)] = 100_000_000,
    resident_ratio: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    device_slots: Annotated[int, typer.Option(min=1)] = 2,
    weight_bytes: Annotated[int, typer.Option(min=2, max=4, help="per parameter")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Print what one step does, op by op, and the memory that it needs."""
    config = DOSConfig(
        stride=_number(stride),
        subgroup_size=subgroup_size,
        resident_ratio=resident_ratio,
        device_slots=device_slots,
    )
    numels = [subgroup.numel for subgroup in partition([params], [0], config.subgroup_size)]
    made = build(
        [SubgroupSize(n, weight_bytes * n, weight_bytes * n) for n in numels],
        stride=config.stride,
        resident_ratio=config.resident_ratio,
        slots=config.device_slots,
    )
    verify(made)
    memory = made.memory()
    if as_json:
        lanes = {lane.value: len(ops) for lane, ops in made.lanes().items()}
        figures = {
            "stride": made.stride,
            "subgroups": len(numels),
            "ops": lanes,
            "host_bytes": memory.host_bytes,
            "device_bytes": memory.device_bytes,
            "plan": str(made),
        }
        typer.echo(json.dumps(figures))
        return
    typer.echo(str(made))
    typer.echo(f"host memory {memory.host_bytes:,} bytes, device {memory.device_bytes:,} bytes")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="measure nothing")] = False,
    directories: Annotated[
        list[Path] | None,
        typer.Option("--dir", help="where checkpoints go; may be repeated  [default: .]"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="a warning fails, too")] = False,
) -> None:
    """Say how this machine suits the optimizer: what it uses, what holds it back, what to do.

    Exit code 1 if torch or the compiled extension is broken, with --strict also if there is a
    warning; notes leave it 0. A small file is made in each directory, and removed.
    """
    with own_stdout() as stdout:
        from dos.doctor import examine, report  # here, because it loads torch

        found = examine(quick=quick, directories=directories or [Path()])
        if as_json:
            print(json.dumps(report(found)), file=stdout)
        else:
            Console(file=stdout).print(_table(found))
    failing = ("broken", "warning") if strict else ("broken",)
    if any(finding.status in failing for finding in found):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: an error for the user is printed in its own words, exit code 2."""
    try:
        app()
    except DOSError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


def _table(found: Sequence[Finding]) -> Table:
    styles = {"ok": "green", "note": "cyan", "warning": "yellow", "broken": "bold red"}
    table = Table("", "", "", show_header=False)
    for finding in found:
        # Text, because a message in brackets is no markup.
        says = Text(finding.value)
        if finding.costs:
            says.append(f"\ncosts: {finding.costs}", "dim")
        if finding.fix:
            says.append(f"\nfix: {finding.fix}", "dim")
        table.add_row(Text(finding.status, styles[finding.status]), finding.name, says)
    return table


def _number(stride: str) -> float | Literal["host"]:
    if stride == "host":
        return "host"
    try:
        return float(stride)
    except ValueError:
        raise ConfigError(
            f"{stride!r} is no stride", where="--stride", fix='give a number >= 1, or "host"'
        ) from None
