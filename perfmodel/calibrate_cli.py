"""`python -m perfmodel calibrate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dos.config import VirtualDevice
from dos.errors import ConfigError
from dos.stdout import own_stdout
from perfmodel.options import check_writable
from perfmodel.profile import NodeProfile

if TYPE_CHECKING:
    import torch

    from perfmodel.calibrate import Calibration

_UNITS = {
    "_bytes_per_s": (1e-9, "GB/s"),
    "_params_per_s": (1e-9, "G parameters/s"),
    "_params_per_s_beside_copies": (1e-9, "G parameters/s"),
    "_params_per_s_by_threads": (1e-9, "G parameters/s"),
    "_s": (1e6, "us"),
}
"""How a figure is shown, by the end of its name; the first that fits."""


def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help='file; without it the cache that stride="auto" reads'),
    ] = None,
    device: Annotated[
        str, typer.Option(help='"auto", "cpu", "virtual" or a torch device')
    ] = "auto",
    pace: Annotated[
        Path | None, typer.Option(help="profile that the virtual device is paced like")
    ] = None,
    disk: Annotated[Path | None, typer.Option(help="a directory on the disk to measure")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; without it all that may be used")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="seconds: only what a stride is solved from")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Measure this machine in about a minute; nothing else should run meanwhile."""
    with own_stdout() as stdout:
        import torch  # here, as what loads it: --help does without

        from perfmodel.cache import write_cache
        from perfmodel.calibrate import calibrate as measure

        measured = _device(device, pace)
        _check_output(output, cached=isinstance(measured, torch.device))
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=1.0)
            try:
                found = measure(
                    measured,
                    directory=disk,
                    threads=threads,
                    quick=quick,
                    progress=lambda stage, share: progress.update(
                        task, description=stage, completed=share
                    ),
                )
            except RuntimeError as error:  # no memory or no threads left, for one
                raise ConfigError(
                    f"the host's update could not be measured: {error}",
                    where="this machine",
                    fix="free memory and threads, or give fewer --threads",
                ) from error
        if output is not None:
            found.profile.save(output)
        written = output or write_cache(found.profile)
        if written is None:
            raise ConfigError(
                "cannot be written", where="the cache", fix="give a file: -o node.json"
            )
        if as_json:
            profile = json.loads(found.profile.to_json())
            figures = {"profile": profile, "left_out": found.left_out, "written": str(written)}
            typer.echo(json.dumps(figures), file=stdout)
        else:
            _print(found, written, Console(file=stdout))


def _device(name: str, pace: Path | None) -> torch.device | VirtualDevice | None:
    import torch

    if pace is not None and name != "virtual":
        raise ConfigError(
            f"{name} cannot be paced", where="--pace", fix="add --device virtual, or leave it out"
        )
    if name == "virtual":
        return VirtualDevice(pace=None if pace is None else NodeProfile.load(pace))
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or not (device.type == "cpu" or _is_there(device)):
        raise ConfigError(
            f"{name!r} is no device of this machine",
            where="--device",
            fix='use "auto", "cpu", "virtual" or a torch device such as "cuda:0"',
        )
    return None if device.type == "cpu" else device


def _is_there(device: torch.device) -> bool:
    import torch

    mine = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    return mine is not None and mine.type == device.type and (device.index or 0) < count


def _check_output(output: Path | None, *, cached: bool) -> None:
    """Refuse what could not be written, before a minute is spent."""
    if output is None and not cached:
        raise ConfigError(
            "only what an accelerator gives is kept in the cache",
            where="--output",
            fix="give a file: -o node.json",
        )
    check_writable(output)


def _print(found: Calibration, path: Path, console: Console) -> None:
    table = Table("rate", "", "", title=found.profile.name, show_header=False)
    for name, value in asdict(found.profile).items():
        for row in _shown(name, value):
            table.add_row(*row)
    console.print(table)
    for name, why in found.left_out.items():
        console.print(f"left out: {name}: {why}", markup=False, highlight=False)
    console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)


def _shown(name: str, value: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(value, Mapping):
        for key, its in value.items():
            for _, number, unit in _shown(name, its):
                yield f"  {key}", number, unit
        return
    scale, unit = next((how for end, how in _UNITS.items() if name.endswith(end)), (0.0, ""))
    if unit and value is not None:
        yield name, f"{scale * value:.3g}", unit
