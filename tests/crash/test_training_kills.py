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

import pytest
import torch

from dos.checkpoint import Checkpointer
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.checkpointer_cases import Training
from tests.cpu.state_cases import PLANS

STEPS = 30
FEW_KILLS, MANY_KILLS = 3, 20


def train(directory: Path, seed: int, told: int) -> None:
    """Train to the end from what there is, telling of each step; the bits are left in a file."""
    torch.set_num_threads(1)  # the parent's are not here
    with Checkpointer(directory, every=2, keep=2, ring_bytes=16 << 20) as checkpointer:
        training = Training(PLANS[1], seed=seed)
        restored = checkpointer.restore(**training.parts)
        if restored is None:
            training = Training(PLANS[1])
        else:
            training.step = restored.step
        while training.step < STEPS:
            training.run(training.step + 1)
            checkpointer.save(training.step, **training.parts)
            os.write(told, b".")
    (directory / "bits").write_text(repr(training.bits()))


def run_child(directory: Path, seed: int, limit_s: float | None) -> tuple[int, float]:
    """Train in a child that is killed so long after its first step; its status, and its time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            train(directory, seed, writer)
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


def kill_trainings(folder: Path, kills: int, seed: int) -> None:
    """Kill trainings at any time; each that comes to its end has the bits of one never killed."""
    _, whole_s = run_child(folder / "whole", 0, None)
    bits = (folder / "whole" / "bits").read_text()
    random_s = random.Random(seed)
    runs = 0
    while kills:
        directory = folder / str(runs)
        status, _ = run_child(directory, kills, random_s.uniform(0, whole_s / 2))
        if status:
            kills -= 1
        else:
            assert (directory / "bits").read_text() == bits
            runs += 1
    run_child(folder / str(runs), 1, None)
    assert (folder / str(runs) / "bits").read_text() == bits


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as path:
        # Warms what the children inherit.
        with Checkpointer(Path(path) / "warm", ring_bytes=16 << 20) as checkpointer:
            checkpointer.save(1, **Training(PLANS[1]).run(1).parts)
            checkpointer.restore(**Training(PLANS[1]).parts)
        yield Path(path)


def test_a_killed_training_goes_on_to_the_same_bits(folder: Path) -> None:
    kill_trainings(folder, FEW_KILLS, seed=1)


@pytest.mark.slow
def test_a_training_killed_often_goes_on_to_the_same_bits(folder: Path) -> None:
    kill_trainings(folder, MANY_KILLS, seed=2)
