"""`dos bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dos.errors import ConfigError
from dos.stdout import own_stdout

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

TUNE_BYTES, TUNE_ROUNDS = 512 << 20, 3


@app.callback()
def bench() -> None:
    """Measure this machine."""


@app.command()
def ckpt(
    directory: Annotated[Path | None, typer.Option("--dir", help="on the disk to measure")] = None,
    gib: Annotated[float, typer.Option(min=0.001, help="size of the state")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 7,
    peer_rounds: Annotated[
        int, typer.Option(min=0, help="of them with the other libraries, too")
    ] = 3,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="states of many and of tiny tensors, too")
    ] = False,
    tune: Annotated[
        Path | None, typer.Option(help="find and keep the best requests for this directory's disk")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Save and load checkpoints beside the bare disk and other libraries; or tune for a disk."""
    if (directory is None) == (tune is None):
        raise ConfigError(
            "there is nothing to measure, or two things",
            where="dos bench ckpt",
            fix="give either --dir or --tune",
        )
    with own_stdout() as stdout:
        console = Console(stderr=True)
        if tune is not None:
            figures = _tune(tune, console)
        else:
            assert directory is not None
            figures = _measure(
                directory, int(gib * (1 << 30)), rounds, peer_rounds, shapes, console
            )
        if as_json:
            print(json.dumps(figures), file=stdout)


def _measure(
    directory: Path, n_bytes: int, rounds: int, peer_rounds: int, shapes: bool, console: Console
) -> dict[str, Any]:
    from dos.bench.ckpt import Bench  # here, because it loads torch

    bench = Bench(str(directory), n_bytes, console.print)
    figures = bench.run(rounds, peer_rounds)
    if shapes:
        figures["shapes"] = bench.shapes(min(rounds, 3))
    table = Table(title=f"{n_bytes / 2**30:g} GiB, {rounds} rounds, medians in GiB/s")
    for column in ("", "save", "load"):
        table.add_column(column)
    for name, rates in bench.saves.items():
        save, load = (sorted(one)[len(one) // 2] for one in (rates, bench.loads[name]))
        table.add_row(name, f"{save:.2f}", f"{load:.2f}")
    console.print(table)
    return figures


def _tune(directory: Path, console: Console) -> dict[str, Any]:
    from dos.bench.tune import tune
    from dos.checkpoint.tuning import keep_shape, mount_of

    if not directory.is_dir():
        raise ConfigError("there is no such directory", where=str(directory), fix="make it first")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("writing and reading", total=None)
        best, figures = tune(
            str(directory),
            TUNE_BYTES,
            TUNE_ROUNDS,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    file = keep_shape(str(directory), best)
    console.print(f"{best} is kept for {mount_of(str(directory))} in {file}")
    return {"chosen": best.model_dump(), "kept_in": str(file), "shapes": figures}
