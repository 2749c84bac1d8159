"""A training that is killed at any time goes on from its newest checkpoint, to the same bits."""

from __future__ import annotations

import os
import random
import select
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dos.checkpoint import Checkpointer
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.checkpointer_cases import WIDE, Training
from tests.cpu.state_cases import PLANS

FEW_KILLS, MANY_KILLS = 3, 20


class Kind(NamedTuple):
    """A training: how it is made, and how long it is."""

    how: dict[str, Any]
    steps: int


SMALL, LARGE = Kind({"plan": PLANS[1]}, 30), Kind(WIDE, 10)


def train(directory: Path, kind: Kind, seed: int, told: int) -> None:
    """Train to the end from what there is, telling of each step; the bits are left in a file."""
    torch.set_num_threads(1)  # the parent's are not here
    with Checkpointer(directory, every=2, keep=2, ring_bytes=16 << 20) as checkpointer:
        training = Training(**kind.how, seed=seed)
        restored = checkpointer.restore(**training.parts)
        if restored is None:
            training = Training(**kind.how)
        else:
            training.step = restored.step
        while training.step < kind.steps:
            training.run(training.step + 1)
            checkpointer.save(training.step, **training.parts)
            os.write(told, b".")
    (directory / "bits").write_text(repr(training.bits()))


def run_child(directory: Path, kind: Kind, seed: int, limit_s: float | None) -> tuple[int, float]:
    """Train in a child that is killed so long after its first step; its status, and its time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            train(directory, kind, seed, writer)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never into the parent's tests
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as told:
        told.read(1)
        began_s = time.monotonic()
        end = os.pidfd_open(child)
        select.select([end], [], [], limit_s)
        os.close(end)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the training failed"
    return status, time.monotonic() - began_s


def kill_trainings(folder: Path, kind: Kind, kills: int, seed: int) -> None:
    """Kill trainings at any time; each that comes to its end has the bits of one never killed."""
    _, whole_s = run_child(folder / "whole", kind, 0, None)
    bits = (folder / "whole" / "bits").read_text()
    random_s = random.Random(seed)
    runs = 0
    while kills:
        directory = folder / str(runs)
        status, _ = run_child(directory, kind, kills, random_s.uniform(0, whole_s / 2))
        if status:
            kills -= 1
        else:
            assert (directory / "bits").read_text() == bits
            runs += 1
    run_child(folder / str(runs), kind, 1, None)
    assert (folder / str(runs) / "bits").read_text() == bits


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as path:
        # Warms what the children inherit.
        with Checkpointer(Path(path) / "warm", ring_bytes=16 << 20) as checkpointer:
            checkpointer.save(1, **Training(PLANS[1]).run(1).parts)
            checkpointer.restore(**Training(PLANS[1]).parts)
        yield Path(path)


@pytest.mark.parametrize("kind", [SMALL, LARGE], ids=["one chunk", "several chunks"])
def test_a_killed_training_goes_on_to_the_same_bits(kind: Kind, folder: Path) -> None:
    kill_trainings(folder, kind, FEW_KILLS, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SMALL, LARGE], ids=["one chunk", "several chunks"])
def test_a_training_killed_often_goes_on_to_the_same_bits(kind: Kind, folder: Path) -> None:
    kill_trainings(folder, kind, MANY_KILLS, seed=2)
