"""A process that is killed while it saves leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("dos.checkpoint.saving")

from dos.checkpoint import load, save

FEW_KILLS, MANY_KILLS = 10, 300


def state(step: int) -> dict[str, Any]:
    """Several blocks, of another size at every step."""
    return {"step": step, "weight": torch.full((3000 + step,), float(step)), "names": ("a", step)}


def save_until_killed(path: str, step: int, told: int) -> None:
    """Save one step after the other, and tell each that is durable."""
    while True:
        step += 1
        save(state(step), path, latest=True).result()
        os.write(told, step.to_bytes(4, "little"))


def kill_saves(directory: Path, kills: int, seed: int) -> None:
    """Kill children that save; after each only the last step it told or the next may be read.

    Each has saved twice, and is killed somewhere in as long as the second save took, and half of
    that more.
    """
    random_s = random.Random(seed)
    path = str(directory / "step")
    save(state(0), path, latest=True).result()  # warms what the children inherit
    durable = 0
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(path, durable, writer)
            finally:
                os._exit(1)  # never into the parent's tests
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as told:
            steps = told.read(4)
            began_s = time.monotonic()
            steps += told.read(4)
            took_s = time.monotonic() - began_s
            select.select([], [], [], random_s.uniform(0, 1.5 * took_s))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            steps += told.read()
        assert len(steps) >= 8, "the child could not save"
        durable = int.from_bytes(steps[-4:], "little")
        found = load(path)
        assert found["step"] in (durable, durable + 1)
        assert torch.equal(found["weight"], state(found["step"])["weight"])
        durable = found["step"]


def test_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    kill_saves(tmp_path, FEW_KILLS, seed=1)


@pytest.mark.slow
def test_many_killed_saves_leave_the_old_or_the_new(tmp_path: Path) -> None:
    kill_saves(tmp_path, MANY_KILLS, seed=2)
