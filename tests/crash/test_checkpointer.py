"""A Checkpointer that is stopped after any of its calls leaves what the next one goes on from."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dos.checkpoint import Checkpointer
from tests.crash.crashes import crash_everywhere, fail_everywhere, unneeded_steps
from tests.crash.disk import SimulatedDisk
from tests.crash.image import Image

PATH = "/run"

pytestmark = pytest.mark.filterwarnings("ignore:.*is not whole")


def saving(*steps: int, pins: int | None = None, keep: int = 1) -> Callable[[Any, str], None]:
    def save(storage: Any, path: str) -> None:
        with Checkpointer(path, keep=keep, storage=storage, ring_bytes=4 << 20) as checkpointer:
            for step in steps:
                checkpointer.save(step, model={"m": torch.nn.Linear(3, step)})
        if pins is not None:
            checkpointer.pin(pins)

    return save


def newest(storage: Any, path: str) -> int:
    """The step that is restored, its tensor checked."""
    with Checkpointer(path, storage=storage, ring_bytes=4 << 20) as checkpointer:
        restored = checkpointer.restore()
        if restored is None:
            raise LookupError
        model = torch.nn.Linear(3, restored.step)
        checkpointer.restore(restored.step, model={"m": model})
        return restored.step


def all_steps(storage: Any, path: str) -> dict[int, bool]:
    """Steps that can be restored, and whether they are pinned."""
    with Checkpointer(path, storage=storage, ring_bytes=4 << 20) as checkpointer:
        listed = checkpointer.list()
        for saved in listed:
            checkpointer.restore(saved.step)
        return {saved.step: saved.pinned for saved in listed}


def disk_after(*saves: Callable[[Any, str], None]) -> Image:
    disk = SimulatedDisk()
    for save in saves:
        save(disk, PATH)
    return disk.durable


def test_a_first_save_survives_every_crash() -> None:
    assert crash_everywhere(saving(1), newest, PATH).faults == []


def test_a_save_that_removes_the_one_before_survives_every_crash() -> None:
    crashes = crash_everywhere(saving(2), newest, PATH, before=disk_after(saving(1)))
    assert crashes.faults == []
    assert crashes.different > 20


def test_a_save_of_a_step_that_is_there_survives_every_crash() -> None:
    def save(storage: Any, path: str) -> None:
        saving(1)(storage, path)  # in the same place, with a later number

    def number(storage: Any, path: str) -> str:
        newest(storage, path)
        return str(storage.read_bytes(f"{path}/step-00000001/manifest.json"))

    crashes = crash_everywhere(save, number, PATH, before=disk_after(saving(1)))
    assert crashes.faults == []


def test_what_is_pinned_survives_every_crash_of_a_retention() -> None:
    def pinned(storage: Any, path: str) -> dict[int, bool]:
        found = all_steps(storage, path)
        return {step: is_pinned for step, is_pinned in found.items() if step in (1, max(found))}

    before = disk_after(saving(1, pins=1), saving(2))
    crashes = crash_everywhere(saving(3), pinned, PATH, before=before)
    assert crashes.faults == []


def test_pinning_survives_every_crash() -> None:
    def pin(storage: Any, path: str) -> None:
        saving(pins=2)(storage, path)

    before = disk_after(saving(1, 2, 3, pins=1, keep=3))
    assert crash_everywhere(pin, all_steps, PATH, before=before).faults == []
    assert unneeded_steps(pin, all_steps, PATH, before=before) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_call_leaves_a_checkpoint_and_the_next_save_succeeds(number: int) -> None:
    before = disk_after(saving(1))
    assert fail_everywhere(saving(2), newest, PATH, number, before=before) == []


def test_a_retention_that_was_cut_short_is_finished_by_the_next() -> None:
    disk = SimulatedDisk()
    saving(1, 2, keep=2)(disk, PATH)
    disk.unlink(f"{PATH}/step-00000001/manifest.json")
    saving(3, keep=2)(disk, PATH)
    assert disk.listing(PATH) == ["latest", "step-00000002", "step-00000003"]
