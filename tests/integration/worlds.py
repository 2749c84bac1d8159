"""Scenarios run in processes of their own, one per rank; all of one world in the same ones.

A scenario is a function without arguments that all ranks run together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280.0


@dataclass(frozen=True)
class Outcome:
    """What a scenario returned, per rank."""

    ranks: list[Any]

    @property
    def first(self) -> Any:
        """Of rank 0."""
        return self.ranks[0]


def run_world(names: Sequence[str], world: int, **environment: str) -> dict[str, Outcome | str]:
    """Run scenarios one after the other on `world` ranks.

    Args:
        names: of functions, with that of their module.
        world: how many ranks.
        **environment: further variables that they find.

    Returns:
        What each returned; text, where it did not, that tells why.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _processes(names, world, Path(folder), environment) as processes:
            for process in processes:
                try:
                    process.wait(timeout=TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    break  # what is missing then says so
        return {name: _outcome(name, world, Path(folder)) for name in names}


@contextmanager
def _processes(
    names: Sequence[str], world: int, folder: Path, environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One per rank, each with a file for what it says; none is left afterwards."""
    ours = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(":"), str(ROOT)]),
        **environment,
    }
    with ExitStack() as cleanup:
        processes = []
        for rank in range(world):
            its = {**ours, "RANK": rank, "LOCAL_RANK": rank}
            log = cleanup.enter_context(open(folder / f"log.{rank}", "wb"))
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.integration.worker", folder, *names],
                cwd=ROOT,
                env={**os.environ, **{key: str(value) for key, value in its.items()}},
                stdout=log,
                stderr=log,
            )
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            processes.append(process)
        yield processes


def _outcome(name: str, world: int, folder: Path) -> Outcome | str:
    paths = [folder / f"{name}.{rank}" for rank in range(world)]
    if all(path.exists() for path in paths):
        return Outcome([torch.load(path, weights_only=False) for path in paths])
    errors = {rank: folder / f"{name}.{rank}.error" for rank in range(world)}
    said = {rank: path.read_text() for rank, path in errors.items() if path.exists()}
    if not said:  # the processes ended before, or wait for one another
        said = {rank: (folder / f"log.{rank}").read_text(errors="replace") for rank in errors}
    return "\n".join(f"{name}, rank {rank}:\n{text[-4000:]}" for rank, text in said.items())
