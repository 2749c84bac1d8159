"""What a disk does for a program that only reads and writes: fio's io_uring, past the cache."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from dos.errors import ConfigError

GIB = 1 << 30


class Shape(NamedTuple):
    """Of fio's requests: size and number in flight."""

    block: str
    depth: int


SHAPES = [Shape(block, depth) for block, depth in itertools.product(("1M", "8M"), (8, 32))]
WRITE_OPTIONS = ("--rw=write", "--fallocate=native", "--end_fsync=1")


def write_gib_per_s(path: str, n_bytes: int, shape: Shape) -> float:
    """Write a new file and sync it."""
    return _run(path, n_bytes, shape, *WRITE_OPTIONS)


def read_gib_per_s(path: str, n_bytes: int, shape: Shape) -> float:
    """Read a file from the disk."""
    return _run(path, n_bytes, shape, "--rw=read")


def best_shapes(path: str, n_bytes: int, fresh: Callable[[], None], rounds: int) -> list[Shape]:
    """The fastest shape to write, and to read: of medians over some rounds.

    Args:
        path: of the file; not there afterwards.
        n_bytes: size of the file.
        fresh: removes the file, and waits until the disk is at rest.
        rounds: how often each shape is tried.
    """
    writes: dict[Shape, list[float]] = {shape: [] for shape in SHAPES}
    reads: dict[Shape, list[float]] = {shape: [] for shape in SHAPES}
    for _ in range(rounds):
        for shape in SHAPES:
            fresh()
            writes[shape].append(write_gib_per_s(path, n_bytes, shape))
            reads[shape].append(read_gib_per_s(path, n_bytes, shape))
    fresh()
    return [max(SHAPES, key=lambda one: statistics.median(rates[one])) for rates in (writes, reads)]


def _run(path: str, n_bytes: int, shape: Shape, *options: str) -> float:
    program = shutil.which("fio")
    if program is None:
        raise ConfigError(
            "there is no fio to measure the bare disk with",
            where="dos bench ckpt",
            fix="apt-get install fio, or the like of another distribution",
        )
    command = [program, "--name=raw", f"--filename={path}", f"--size={n_bytes}", "--direct=1"]
    command += ["--ioengine=io_uring", f"--bs={shape.block}", f"--iodepth={shape.depth}"]
    done = subprocess.run(
        [*command, "--output-format=json", *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(
            f"fio ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}",
            where=path,
            fix="see whether this disk takes direct I/O, and this system io_uring",
        )
    # Its warnings may stand before the object.
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    # With the sync at its end, which its bandwidth leaves out.
    return n_bytes / GIB / (float(job["job_runtime"]) / 1e3)
