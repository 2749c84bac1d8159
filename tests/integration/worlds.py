"""Scenarios run in processes of their own, one per rank; all of one world in the same ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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


def run_world(names: Sequence[str], world: int) -> dict[str, Outcome | str]:
    """Run scenarios one after the other on `world` ranks; an error is its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [_start(names, rank, world, Path(folder)) for rank in range(world)]
        try:
            said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return {name: _outcome(name, world, Path(folder), said) for name in names}


def _start(names: Sequence[str], rank: int, world: int, folder: Path) -> subprocess.Popen[str]:
    ours = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(":"), str(ROOT)]),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.integration.worker", str(folder), *names],
        cwd=ROOT,
        env={**os.environ, **{key: str(value) for key, value in ours.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _outcome(name: str, world: int, folder: Path, said: Sequence[str]) -> Outcome | str:
    ranks = []
    for rank in range(world):
        path = folder / f"{name}.{rank}"
        if not path.exists():
            return f"rank {rank} did not get there; it said:\n{said[rank][-4000:]}"
        result = torch.load(path, weights_only=False)
        if isinstance(result, str) and result.startswith("Traceback"):
            return f"rank {rank}: {result}"
        ranks.append(result)
    return Outcome(ranks)
