"""The command `python -m perfmodel`."""

from __future__ import annotations

import sys

import typer

from dos.errors import DOSError
from perfmodel.calibrate_cli import calibrate
from perfmodel.fit_cli import compare, fit
from perfmodel.predict_cli import plot, predict, simulate
from perfmodel.solve_cli import checkpoint_interval, solve

app = typer.Typer(no_args_is_help=True, add_completion=False)
for command in (calibrate, predict, solve, simulate, plot, fit, compare, checkpoint_interval):
    app.command()(command)


@app.callback()
def about() -> None:
    """How long an update takes, on machines that are there and machines that are not."""


def main() -> None:
    """Entry point: an error for the user is printed in its own words, exit code 2."""
    try:
        app(prog_name="python -m perfmodel")
    except DOSError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
