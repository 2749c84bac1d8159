"""Every measurement by name: its command, how long it takes, and a reduced form of it.

`python -m experiments.all` runs them as they are told here and keeps their numbers;
`python -m experiments.bench` runs the reduced forms side by side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measurement:
    """A command that prints one JSON object.

    Attributes:
        command: of Python.
        minutes: about how long the whole measurement takes on two cores that do nothing else.
        options: of the whole measurement.
        reduced: of a shorter one; None: there is none.
        limit_s: how long the shorter one may take.
        on_disk: it measures a disk, and takes `--dir`.
        on_gpu: it measures a GPU; `--device cpu` plays it.
    """

    command: tuple[str, ...]
    minutes: float
    options: tuple[str, ...] = ()
    reduced: tuple[str, ...] | None = None
    limit_s: float = 120.0
    on_disk: bool = False
    on_gpu: bool = False


def _bench(name: str) -> tuple[str, ...]:
    return ("-m", f"experiments.bench_{name}", "--json")


MEASUREMENTS = {
    "predictions": Measurement(("-m", "experiments.predictions"), 0.5),
    "bench_update": Measurement(
        _bench("update"), 2, reduced=("--params", "20000000", "--rounds", "12"), limit_s=300
    ),
    "bench_gpu_update": Measurement(
        _bench("gpu_update"),
        5,
        reduced=("--params", "500000", "--step-params", "1000000", "--rounds", "5"),
        limit_s=90,
        on_gpu=True,
    ),
    "bench_zero3": Measurement(
        _bench("zero3"),
        4,
        reduced=("--params=20000000", "--width=1024", "--virtual-params=4000000", "--rounds=6"),
        limit_s=150,
    ),
    "bench_overlap": Measurement(
        _bench("overlap"),
        3,
        ("--stretch", "2"),
        ("--layers", "8", "--steps", "8"),
        90,
    ),
    "bench_model": Measurement(
        ("-m", "experiments.bench_model"), 5, reduced=("--plans", "6"), limit_s=90
    ),
    "bench_sweep": Measurement(_bench("sweep"), 4),
    "bench_phases": Measurement(_bench("phases"), 3),
    "bench_ckpt": Measurement(
        ("-c", "from dos.cli import main; main()", "bench", "ckpt", "--json"),
        6,
        ("--shapes",),
        ("--gib", "0.5", "--rounds", "3", "--peer-rounds", "3"),
        180,
        on_disk=True,
    ),
    "bench_capture": Measurement(
        _bench("capture"), 8, (), ("--gib", "0.25", "--rounds", "1"), 150, on_disk=True
    ),
    "bench_io": Measurement(
        _bench("io"),
        12,
        ("--crossed", "--gib", "0.5", "--rounds", "3"),
        ("--gib", "0.125", "--rounds", "2"),
        120,
        on_disk=True,
    ),
    "bench_ablation": Measurement(_bench("ablation"), 6, on_disk=True),
    "bench_ranks": Measurement(
        _bench("ranks"),
        6,
        reduced=("--gib", "0.25", "--ranks", "2", "--rounds", "3"),
        limit_s=90,
        on_disk=True,
    ),
}


LAST_WORDS_S = 10.0
"""For a process that is interrupted: a compilation has to give up its lock."""


class MeasurementError(Exception):
    """A measurement that gave no numbers, and why."""


def measured(arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The object that Python prints for these arguments, in a process of its own.

    Raises:
        MeasurementError: it failed, printed no object, or took too long; it is gone by then, and
            so are the processes that it started.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise MeasurementError(f"took more than {timeout_s:.0f} s") from None
        raise
    try:
        figures = json.loads(said)
    except ValueError:
        figures = None
    if process.returncode or not isinstance(figures, dict):
        raise MeasurementError(f"ended with {process.returncode}; what it said stands above")
    return figures


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a process and all that it started, then kill what is left of them."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
    process.communicate()
