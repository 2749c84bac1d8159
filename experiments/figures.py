"""What every measurement does with its figures: quartiles, their machine, the JSON object."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TextIO, TypeAlias

import typer

from dos.doctor.disks import mount_and_type
from dos.kernels import adam
from perfmodel.machine import processor_name

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="one JSON object")]
Output: TypeAlias = Annotated[
    Path | None, typer.Option("--output", help="file for the JSON object, too")
]
VERSIONS_OF = ("torch", "triton", "deepspeed", "numpy", "safetensors", "torchsnapshot")


def median_and_quartiles(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, and the lower and upper quartile; of a single value, itself."""
    if len(values) == 1:
        return values[0], (values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (low, high)


def native_isas() -> list[str]:
    """Instruction sets of the compiled kernels here, best first; none without the extension."""
    return [name for name in adam.available() if name not in ("numba", "reference")]


def environment(directory: str | Path | None = None) -> dict[str, object]:
    """What a figure depends on besides the code: processor, system, versions, date.

    With a directory also the file system that it is on, and the device of that.
    """
    versions = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    disk = {} if directory is None else {"disk": _disk_of(Path(directory))}
    return {
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "isas": native_isas(),
        **disk,
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _disk_of(directory: Path) -> dict[str, str]:
    device = os.stat(directory).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return {
        "file_system": mount_and_type(directory)[1],
        "device": block.resolve().name if block.exists() else "no block device",
    }


def hand_over(
    figures: Mapping[str, object], stdout: TextIO, *, as_json: bool, output: Path | None
) -> None:
    """The figures as one JSON object: to standard output if wanted, into a file if there is one."""
    if as_json:
        print(json.dumps(figures), file=stdout)
    if output:
        output.write_text(json.dumps(figures, indent=2) + "\n")
