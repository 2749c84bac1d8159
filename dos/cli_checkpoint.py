"""The commands `dos inspect`, `dos verify` and `dos convert`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from dos.stdout import own_stdout

Checkpoint = Annotated[str, typer.Argument(help="a checkpoint's directory, or one with `latest`")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (inspect, verify, convert):
        app.command()(command)


def inspect(path: Checkpoint, as_json: AsJson = False) -> None:
    """List tensors, sizes and objects; nothing is unpickled, no tensor is read."""
    with own_stdout() as stdout:
        from dos.checkpoint import inspect as look  # here, because it loads torch

        found = look(path)
        if as_json:
            typer.echo(json.dumps(found), file=stdout)
            return
        console = Console(file=stdout)
        console.print(Text(f"{found['path']}, id {found['id']}"))
        for file in found["files"]:
            console.print(Text(f"{file['name']}  {file['bytes']:,} bytes"))
        console.print(_table(found))


def verify(path: Checkpoint, as_json: AsJson = False) -> None:
    """Compare all checksums. Exit code 1 if anything is damaged."""
    with own_stdout() as stdout:
        from dos.checkpoint import verify as check
        from dos.errors import IntegrityError

        try:
            with _bar("verifying") as advance:
                damages = check(path, progress=advance)
        except IntegrityError as error:
            damages = [error]
        if as_json:
            said = [{"file": one.where, "what": one.what} for one in damages]
            typer.echo(
                json.dumps({"path": path, "whole": not damages, "damages": said}), file=stdout
            )
        else:
            for one in damages:
                typer.echo(f"damaged: {one}", file=stdout)
            if not damages:
                typer.echo("whole", file=stdout)
    if damages:
        raise typer.Exit(1)


def convert(
    source: Annotated[
        str, typer.Argument(help="a checkpoint, .pt, safetensors, DCP or a tag of DeepSpeed's")
    ],
    target: Annotated[str, typer.Argument(help="what to write")],
    to: Annotated[
        Literal["dos", "pt", "safetensors", "dcp", "deepspeed"], typer.Option(help="its form")
    ],
    only: Annotated[str | None, typer.Option(help="pattern of paths; * matches / too")] = None,
    part: Annotated[str | None, typer.Option(help="keys joined by `.` to what is written")] = None,
    trusted: Annotated[bool, typer.Option("--trusted", help="unpickle: may run any code")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another form."""
    with own_stdout() as stdout:
        from dos.integrations.deepspeed_convert import convert_deepspeed, is_deepspeed

        if to == "deepspeed" or is_deepspeed(source):
            convert_deepspeed(source, target, to, only=only, part=part, trusted=trusted)
        else:
            from dos.checkpoint.convert import convert as run

            run(source, target, to, only=only, part=part, trusted=trusted)
        said: dict[str, Any] = {"source": source, "target": target, "to": to}
        typer.echo(json.dumps(said) if as_json else f"wrote {target}", file=stdout)


def _table(found: dict[str, Any]) -> Table:
    table = Table("name", "type", "shape", "bytes")
    for one in found["tensors"]:
        kind = one["type"] + (f", view of {one['view_of']}" if "view_of" in one else "")
        shape = "×".join(map(str, one["shape"])) or "scalar"
        table.add_row(*map(_text, (one["name"], kind, shape, f"{one['bytes']:,}")))
    for one in found["objects"]:
        value = str(one.get("value", ""))
        n_bytes = f"{one['bytes']:,}" if "bytes" in one else ""
        table.add_row(*map(_text, (one["name"], one["type"], value, n_bytes)))
    return table


def _text(said: str) -> Text:
    """What a file says, without what a terminal would obey or cannot show."""
    return Text("".join(char if char.isprintable() else ascii(char)[1:-1] for char in said))


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what)
        yield lambda done, total: progress.update(task, completed=done, total=total)
