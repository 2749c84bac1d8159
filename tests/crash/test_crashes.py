"""The crashes find what they are for: proved on the least protocol that survives them."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest

from dos.checkpoint.posix import PosixStorage
from tests.crash.crashes import crash_everywhere, fail_everywhere, images, unneeded_steps
from tests.crash.disk import SimulatedDisk
from tests.crash.image import Image
from tests.crash.injector import Injector
from tests.crash.toy import BLOCK, restore_value, save_value

OLD, NEW = b"old" + bytes(3 * BLOCK - 3), b"new" * BLOCK
PATH = "/checkpoint"


def disk_with(value: bytes) -> Image:
    disk = SimulatedDisk()
    save_value(value)(disk, PATH)
    return disk.durable


def test_a_right_save_survives_every_crash() -> None:
    crashes = crash_everywhere(save_value(NEW), restore_value, PATH, before=disk_with(OLD))
    assert crashes.faults == []
    assert crashes.images > 400
    assert crashes.different > 25


def test_a_right_first_save_survives_every_crash() -> None:
    assert crash_everywhere(save_value(NEW), restore_value, PATH).faults == []


@pytest.mark.parametrize("step", ["sync data", "sync seal", "sync directory", "sync parent"])
@pytest.mark.parametrize("before", [OLD, None])
def test_a_save_without_one_of_its_steps_is_caught(step: str, before: bytes | None) -> None:
    save = save_value(NEW, but=step)
    image = disk_with(before) if before else None
    assert crash_everywhere(save, restore_value, PATH, before=image).faults


def test_every_step_of_a_right_save_is_needed() -> None:
    assert unneeded_steps(save_value(NEW), restore_value, PATH, before=disk_with(OLD)) == []


def test_a_step_that_is_good_for_nothing_is_named() -> None:
    def twice(storage: Any, path: str) -> None:
        save_value(NEW)(storage, path)
        storage.fsync_directory("/")

    found = unneeded_steps(twice, restore_value, PATH, before=disk_with(OLD))
    assert len(found) == 1
    assert "fsync_directory" in found[0]


def test_a_save_in_place_is_caught() -> None:
    def in_place(storage: Any, path: str) -> None:
        file = storage.open(f"{path}/data", write=True, direct=False)
        storage.truncate(file, 0)
        queue = storage.queue()
        queue.write(file, 0, memoryview(NEW), 0)
        queue.drain()
        storage.fsync(file)
        storage.close(file)

    def read(storage: Any, path: str) -> bytes:
        return bytes(storage.read_bytes(f"{path}/data"))

    assert crash_everywhere(in_place, read, PATH, before=disk_with(OLD)).faults


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_call_leaves_the_old_and_the_next_save_succeeds(number: int) -> None:
    faults = fail_everywhere(save_value(NEW), restore_value, PATH, number, before=disk_with(OLD))
    assert faults == []


def test_a_save_that_hides_a_failure_is_caught() -> None:
    def careless(storage: Any, path: str) -> None:
        try:
            save_value(NEW)(storage, path)
        except OSError:
            return

    assert fail_everywhere(careless, restore_value, PATH, errno.EIO, before=disk_with(OLD))


def test_a_failed_sync_lets_go_of_what_was_pending() -> None:
    disk = SimulatedDisk()
    storage = Injector(disk, fault=lambda _, name: errno.EIO if name == "fsync" else 0)
    file = storage.open("/file", write=True, create=True)
    disk.put(file, 0, b"x")
    with pytest.raises(OSError, match="error"):
        storage.fsync(file)
    disk.fsync(file)
    disk.fsync_directory("/")
    assert SimulatedDisk(disk.durable).read_bytes("/file") == b""
    assert disk.read_bytes("/file") == b"x"


def test_a_rename_is_all_or_nothing() -> None:
    disk = SimulatedDisk()
    disk.write_bytes("/a", b"a")
    disk.mkdir("/d")
    disk.fsync_directory("/")
    disk.rename("/a", "/d/b")
    for _, image in images(disk, 0):
        after = SimulatedDisk(image)
        assert after.exists("/a") != after.exists("/d/b")


def test_a_write_may_be_torn() -> None:
    disk = SimulatedDisk()
    file = disk.open("/a", write=True, create=True, direct=False)
    disk.fsync_directory("/")
    disk.put(file, 0, b"x" * BLOCK)
    found = {SimulatedDisk(image).read_bytes("/a") for _, image in images(disk, 0)}
    assert any(content not in (b"", b"x" * BLOCK) for content in found)


def test_direct_writes_are_not_durable_before_a_sync() -> None:
    disk = SimulatedDisk()
    file = disk.open("/a", write=True, create=True)
    assert file.direct
    queue = disk.queue()
    queue.write(file, 0, memoryview(mmap.mmap(-1, BLOCK)), 0)
    queue.drain()
    disk.fsync_directory("/")
    assert SimulatedDisk(disk.durable).read_bytes("/a") == b""
    disk.fsync(file)
    assert SimulatedDisk(disk.durable).read_bytes("/a") == bytes(BLOCK)


def test_what_is_in_flight_is_not_synced() -> None:
    disk = SimulatedDisk()
    file = disk.open("/a", write=True, create=True)
    queue = disk.queue()
    queue.write(file, 0, memoryview(mmap.mmap(-1, BLOCK)), 0)
    disk.fsync(file)
    disk.fsync_directory("/")
    queue.drain()
    assert SimulatedDisk(disk.durable).read_bytes("/a") == b""


def test_a_buffer_that_changes_in_flight_is_noticed() -> None:
    disk = SimulatedDisk()
    file = disk.open("/a", write=True, create=True)
    queue = disk.queue()
    memory = memoryview(mmap.mmap(-1, BLOCK))
    queue.write(file, 0, memory, 0)
    memory[0] = 1
    with pytest.raises(AssertionError, match="changed in flight"):
        queue.drain()


@pytest.mark.parametrize(("offset", "n_bytes"), [(0, 100), (100, BLOCK)])
def test_a_direct_transfer_must_be_aligned(offset: int, n_bytes: int) -> None:
    disk = SimulatedDisk()
    file = disk.open("/a", write=True, create=True)
    queue = disk.queue()
    queue.write(file, offset, memoryview(mmap.mmap(-1, 2 * BLOCK))[:n_bytes], 0)
    ((_, error),) = queue.drain()
    assert error is not None
    assert error.errno == errno.EINVAL


def test_a_full_disk_keeps_what_it_reserved_until_it_is_removed() -> None:
    disk = SimulatedDisk(capacity_bytes=BLOCK)
    file = disk.open("/a", write=True, create=True)
    with pytest.raises(OSError, match="No space"):
        disk.preallocate(file, 2 * BLOCK)
    with pytest.raises(OSError, match="No space"):
        disk.write_bytes("/b", b"x")
    disk.unlink("/a")
    disk.write_bytes("/c", b"x")


def order_of_completions(storage: Any, seed: int, folder: str) -> list[int]:
    injector = Injector(storage, seed=seed)
    file = injector.open(f"{folder}/file{seed}", write=True, create=True, direct=False)
    queue = injector.queue(depth=8)
    for token in range(20):
        queue.write(file, token * 10, memoryview(bytes(10)), token)
    told: list[int] = []
    while len(told) < 20:
        told += [token for token, _ in queue.completed(wait=True)]
    queue.close()
    injector.close(file)
    assert sorted(told) == list(range(20))
    return told


def test_completions_come_in_an_order_that_the_seed_decides() -> None:
    first = order_of_completions(SimulatedDisk(), 1, "")
    assert first == order_of_completions(SimulatedDisk(), 1, "")
    assert first != order_of_completions(SimulatedDisk(), 2, "")
    assert first != sorted(first)


def test_the_injector_wraps_a_real_file_system_too(tmp_path: Path) -> None:
    order_of_completions(PosixStorage(), 1, str(tmp_path))
    storage = Injector(PosixStorage(), seed=3)
    save_value(NEW)(storage, str(tmp_path / "checkpoint"))
    assert restore_value(PosixStorage(), str(tmp_path / "checkpoint")) == NEW
    assert "fsync_directory" in storage.calls
