"""A save that is stopped after any of its calls leaves the old checkpoint or the new one."""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint.commit import remove
from dos.checkpoint.layout import lay_out
from tests.crash.crashes import crash_everywhere, fail_everywhere, unneeded_steps
from tests.crash.disk import SimulatedDisk
from tests.crash.image import Image

PATH = "/checkpoints/saved"


def save_number(number: int, **how: Any) -> Any:
    def save(storage: Any, path: str) -> None:
        state = {"w": torch.full((3000,), number), "number": number}
        saved = dos.checkpoint.save(
            state, path, checkpoint_id=f"id{number}", storage=storage, **how
        )
        saved.result()

    return save


def restore(storage: Any, path: str) -> int:
    state = dos.checkpoint.load(path, storage=storage)
    number = int(state["number"])
    assert torch.equal(state["w"], torch.full((3000,), number))
    return number


def disk_with_one() -> Image:
    disk = SimulatedDisk()
    save_number(1)(disk, PATH)
    return disk.durable


def test_a_save_survives_every_crash() -> None:
    crashes = crash_everywhere(save_number(2), restore, PATH, before=disk_with_one())
    assert crashes.faults == []
    assert crashes.different > 20


def test_a_first_save_survives_every_crash() -> None:
    assert crash_everywhere(save_number(2), restore, PATH).faults == []


def test_every_durable_step_of_a_replacing_save_is_needed() -> None:
    assert unneeded_steps(save_number(2), restore, PATH, before=disk_with_one()) == []


def test_every_durable_step_of_a_first_save_is_needed() -> None:
    assert unneeded_steps(save_number(2), restore, PATH) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_call_leaves_the_old_and_the_next_save_succeeds(number: int) -> None:
    faults = fail_everywhere(save_number(2), restore, PATH, number, before=disk_with_one())
    assert faults == []


def test_an_exchange_that_may_not_be_durable_survives_every_crash() -> None:
    exchanges: list[int] = []

    def fail_once(number: int, name: str) -> int:
        if name == "exchange":
            exchanges.append(number)
        return errno.EIO if name == "fsync_directory" and exchanges == [number - 1] else 0

    def save_twice(storage: Any, path: str) -> None:
        with suppress(dos.CheckpointError):
            save_number(2)(storage, path)
        save_number(2)(storage, path)

    crashes = crash_everywhere(save_twice, restore, PATH, before=disk_with_one(), fault=fail_once)
    assert crashes.faults == []
    assert len(exchanges) == 2


def test_a_removal_leaves_a_whole_checkpoint_or_none() -> None:
    def restore_or_none(storage: Any, path: str) -> int | None:
        try:
            return restore(storage, path)
        except dos.FormatError:  # no manifest: no checkpoint
            return None

    before = disk_with_one()
    assert crash_everywhere(remove, restore_or_none, PATH, before=before).faults == []


@pytest.mark.parametrize("before", [True, False])
def test_latest_never_names_what_is_not_whole(before: bool) -> None:
    def restore_latest(storage: Any, path: str) -> int | None:
        """What `latest` names must be there and whole; without it there is nothing."""
        if not storage.exists("/checkpoints/latest"):
            return None
        return restore(storage, "/checkpoints")

    def save(storage: Any, path: str) -> None:
        save_number(2, latest=True)(storage, "/checkpoints/two")

    disk = SimulatedDisk()
    if before:
        save_number(1, latest=True)(disk, "/checkpoints/one")
    assert crash_everywhere(save, restore_latest, PATH, before=disk.durable).faults == []
    assert unneeded_steps(save, restore_latest, PATH, before=disk.durable) == []


@pytest.mark.parametrize("before", [True, False])
def test_many_chunks_of_large_and_small_extents_survive_every_crash(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dos.checkpoint.layout.LARGE_BYTES", 8192)
    monkeypatch.setattr("dos.checkpoint.draft.lay_out", partial(lay_out, chunk_bytes=4096))

    def state_of(number: int) -> dict[str, Any]:
        sizes = {"large": 3000, "larger": 2500 + 100 * number, "small": 7, "lesser": 300}
        state: dict[str, Any] = {k: torch.full((n,), number) for k, n in sizes.items()}
        return {**state, "objects": bytes([number]) * 5000, "turned": torch.ones(40, 30).t()}

    def save(storage: Any, path: str, number: int = 2) -> None:
        how = {"checkpoint_id": f"id{number}", "storage": storage}
        dos.checkpoint.save(state_of(number), path, **how).result()

    def restore_all(storage: Any, path: str) -> int:
        found = dos.checkpoint.load(path, storage=storage)
        number = int(found["small"][0])
        for name, value in state_of(number).items():
            assert torch.equal(found[name], value) if name != "objects" else found[name] == value
        return number

    disk = SimulatedDisk()
    if before:
        save(disk, PATH, 1)
    image = disk.durable if before else None
    crashes = crash_everywhere(save, restore_all, PATH, before=image)
    assert crashes.faults == []
    assert crashes.different > 100
