"""Scenarios that two processes run together, one after the other, and what they returned.

A scenario is a function without arguments; whatever it returns, torch has to be able to save.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed

ROOT = Path(__file__).parents[3]
PAIR_S = 240  # far more than it takes
SILENCE_S = 60  # after which a process no longer waits for the other

Scenario = Callable[[], object]
_SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """To be run by both processes."""
    _SCENARIOS[function.__name__] = function
    return function


def run_pair(folder: Path, *modules: str) -> None:
    """Run all scenarios of these modules; the processes leave their results in `folder`.

    The first failure ends both processes, which would wait for each other else.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", __spec__.name, str(folder), *modules]
    with open(folder / "log.txt", "w") as log:
        both = [
            subprocess.Popen(
                command, cwd=ROOT, env={**environment, "RANK": rank}, stdout=log, stderr=log
            )
            for rank in "01"
        ]
        try:
            for process in both:
                process.wait(timeout=PAIR_S)
        finally:
            for process in both:
                process.kill()


def results(folder: Path, name: str) -> list[Any]:
    """What a scenario returned in process 0 and in process 1."""
    files = [folder / f"{name}.{rank}.pt" for rank in (0, 1)]
    if not all(file.exists() for file in files):
        raise AssertionError(f"no result of {name}\n{(folder / 'log.txt').read_text()[-6000:]}")
    return [torch.load(file, weights_only=True) for file in files]


def _main(folder: Path, modules: list[str]) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=SILENCE_S),
    )
    os.environ["PAIR_FOLDER"] = str(folder)
    # Under its own name, which is another module than __main__.
    scenarios = import_module(__spec__.name)._SCENARIOS
    for module in modules:
        import_module(module)
    for name, run in scenarios.items():
        try:
            torch.save(run(), folder / f"{name}.{rank}.pt")
        except BaseException:
            print(f"process {rank}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
    distributed.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
