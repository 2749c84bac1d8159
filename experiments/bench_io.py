"""Which way to write tensors into files a disk does best with: `python -m experiments.bench_io`.

The tensors of a transformer's layers, fp32, on two ranks that write at once. The first strategy
is that of the product: a file per rank, tensors gathered into requests of 4 MiB, past the page
cache, by io_uring, 16 in flight. The others differ in what a study of checkpoint I/O varies: a
file per tensor or one that all ranks write to, requests for each tensor alone, through the page
cache, another engine, fewer in flight; one of these at a time, or with `--crossed` combined. All
call the product's engines; none of them writes a header or computes a checksum.

A save ends when it is durable; it makes new files, after the old ones were removed, the disk
synced and a second passed. A load begins with nothing of the files in the page cache, and ends in
fresh tensors. Strategies take turns, every other round the other way round; `save_of_first` and
`load_of_first` are medians of the ratios within a round to the first one, with quartiles.

With `--json` standard output is one JSON object and nothing else; the table is on standard error.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dos.bench.peers import drop_from_cache
from dos.bench.states import random_tensor
from dos.checkpoint.native import refusal
from dos.errors import ConfigError
from dos.stdout import own_stdout
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles
from experiments.io_strategies import Strategy, Tensors, load, save

GIB = 1 << 30
RANKS, LAYERS = 2, 24
REST_S = 1.0
BLOCKS = (3, 1, 4, 4)
"""Sizes of a layer's matrices in squares of the hidden size: attention, its output, the MLP."""

DEPTHS = (1, 4, 16)

Rates = dict[Strategy, list[float]]


def strategies(*, crossed: bool = False) -> list[Strategy]:
    """The product's first; then those that differ from it in one thing, or all combinations.

    Crossed, a file per tensor or rank is combined with every engine, both ways past or through
    the page cache and every depth; "posix" has one depth only.
    """
    ours = Strategy()
    if not crossed:
        found = [replace(ours, files=files, coalesced=False) for files in ("tensor", "rank", "all")]
        found += [replace(ours, files="all"), replace(ours, direct=False)]
        found += [replace(ours, engine=engine) for engine in ("threads", "posix")]
        found += [replace(ours, depth=depth) for depth in DEPTHS if depth != ours.depth]
        return [ours, *found]
    layouts = (("tensor", False), ("rank", False), ("rank", True), ("all", True))
    engines = [("posix", 1), *itertools.product(("threads", "io_uring"), DEPTHS)]
    found = [
        Strategy(files, coalesced, direct, engine, depth)  # type: ignore[arg-type]
        for (files, coalesced), direct, (engine, depth) in itertools.product(
            layouts, (True, False), engines
        )
    ]
    return list(dict.fromkeys([ours, *found]))


def layers(n_bytes: int) -> Tensors:
    """Tensors of layers, matrices and vectors, that are about so many bytes in all."""
    hidden = max(round((n_bytes / 4 / RANKS / LAYERS / sum(BLOCKS)) ** 0.5), 1)
    sizes = [[count * hidden**2 for count in BLOCKS] + 6 * [hidden]] * LAYERS
    return [[random_tensor(4 * n) for layer in sizes for n in layer] for _ in range(RANKS)]


def measure(
    directory: str, gib: float, rounds: int, crossed: bool, progress: Any
) -> dict[str, Any]:
    """All figures, for programs.

    Raises:
        ConfigError: there is no io_uring here to compare with.
    """
    why = refusal("io_uring")
    if why:
        raise ConfigError(
            f"io_uring cannot be had: {why}",
            where="bench_io",
            fix="install liburing-dev and build the project again; see `dos doctor`",
        )
    tensors = layers(int(gib * GIB))
    n_bytes = sum(tensor.nbytes for of_rank in tensors for tensor in of_rank)
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(os.path.abspath(directory), f"dos-bench-io-{os.getpid()}")
    tried = strategies(crossed=crossed)
    saves: Rates = {one: [] for one in tried}
    loads: Rates = {one: [] for one in tried}
    try:
        for number in range(rounds + 1):
            progress(f"round {number} of {rounds}; the first one does not count")
            for one in tried if number % 2 == 0 else tried[::-1]:
                times_s = _save_and_load(one, tensors, path, checked=number == 0)
                if number:
                    for rates, time_s in zip((saves, loads), times_s, strict=True):
                        rates[one].append(n_bytes / GIB / time_s)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return {
        "strategies": {
            one.name: {
                **asdict(one),
                "save": _median(saves[one]),
                "load": _median(loads[one]),
                **_ratios("save_of_first", saves[one], saves[tried[0]]),
                **_ratios("load_of_first", loads[one], loads[tried[0]]),
            }
            for one in tried
        },
        "gib": round(n_bytes / GIB, 3),
        "ranks": RANKS,
        "rounds": rounds,
        "environment": environment(directory),
    }


def table_of(figures: dict[str, Any]) -> Table:
    """The figures, for people."""
    heading = "{gib} GiB of {ranks} ranks, {rounds} rounds, GiB/s"
    table = Table(title=heading.format(**figures))
    for column in ("strategy", "save", "of the first", "load", "of the first"):
        table.add_column(column)
    for name, row in figures["strategies"].items():
        cells = [row[key] for key in ("save", "save_of_first", "load", "load_of_first")]
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    return table


def _save_and_load(
    strategy: Strategy, tensors: Tensors, path: str, *, checked: bool
) -> tuple[float, float]:
    """Seconds of both."""
    shutil.rmtree(path, ignore_errors=True)
    os.sync()
    time.sleep(REST_S)
    begun_s = time.perf_counter()
    save(strategy, tensors, path)
    saved_s = time.perf_counter() - begun_s
    drop_from_cache(path)
    begun_s = time.perf_counter()
    loaded = load(strategy, tensors, path)
    loaded_s = time.perf_counter() - begun_s
    pairs = zip(itertools.chain(*tensors), itertools.chain(*loaded), strict=True)
    if checked and not all(torch.equal(a, b) for a, b in pairs):
        raise AssertionError(f"{strategy.name} has not loaded what it saved")
    return saved_s, loaded_s


def _ratios(name: str, rates: list[float], first: list[float]) -> dict[str, object]:
    pairs = zip(rates, first, strict=True)
    median, quartiles = median_and_quartiles([one / other for one, other in pairs])
    return {name: round(median, 3), f"{name}_quartiles": [round(q, 3) for q in quartiles]}


def _median(rates: list[float]) -> float:
    return round(median_and_quartiles(rates)[0], 3)


def main(
    directory: Annotated[Path, typer.Option("--dir", help="on the disk to measure")],
    gib: Annotated[float, typer.Option(min=0.001, help="size of the tensors")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 5,
    crossed: Annotated[bool, typer.Option("--crossed", help="all combinations")] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Compare ways to write tensors into files."""
    with own_stdout() as stdout:
        console = Console(stderr=True)
        try:
            figures = measure(str(directory), gib, rounds, crossed, console.print)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        console.print(table_of(figures))
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
