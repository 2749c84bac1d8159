"""A save is stopped by a power loss after each of its calls, and what may be on the disk read.

A save is any callable of a file system and a path, a restore likewise; it returns what it
finds, to be compared by `==`, and raises where there is nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.crash.disk import SimulatedDisk
from tests.crash.image import Change, Image, Write
from tests.crash.injector import CHANGES, DROP, Injector

Save = Callable[[Any, str], object]
Restore = Callable[[Any, str], object]

SUBSETS = 20
DURABILITY = ("fsync", "fsync_directory")


def images(disk: SimulatedDisk, seed: int) -> Iterator[tuple[str, Image]]:
    """What may be on the disk after a power loss now, and which case it is.

    Nothing pending is there; all of it; all but one change; one alone; some by seed, in any
    order, writes torn.
    """
    pending = disk.pending
    yield "all lost", disk.durable
    yield "all kept", disk.durable.after(pending)
    for number, change in enumerate(pending):
        what = f"{type(change).__name__} {number}"
        yield f"{what} lost", disk.durable.after(c for c in pending if c is not change)
        yield f"{what} alone kept", disk.durable.after([change])
    for subset in range(SUBSETS if pending else 0):
        random = Random(f"{seed} {subset}")
        yield f"subset {subset}", disk.durable.after(_some(pending, random))


def _some(pending: list[Change], random: Random) -> list[Change]:
    kept: list[Change] = []
    for change in pending:
        if random.random() < 0.5:
            torn = isinstance(change, Write) and random.random() < 0.5
            kept += change.torn(random) if torn else [change]
    random.shuffle(kept)
    return kept


@dataclass
class Crashes:
    """What became of the crashes of a save.

    Attributes:
        images: what might have been on the disk, over all crashes.
        different: those that could be told from an earlier one; only these were read.
        faults: for each wrong one, after which call, which case, and what was found.
    """

    images: int = 0
    different: int = 0
    faults: list[str] = field(default_factory=list)


def crash_everywhere(
    save: Save,
    restore: Restore,
    path: str,
    *,
    before: Image | None = None,
    seed: int = 0,
    fault: Callable[[int, str], int] = lambda number, name: 0,
) -> Crashes:
    """Crash a save after each of its calls; each image must restore to the old or the new.

    Once the save has returned only the new is right.

    Args:
        save: what is crashed; may do its work in a thread, but ends it before it returns.
        restore: reads an image.
        path: handed to both.
        before: what is on the disk at first; there the old is read. None: nothing, nor is then
            an error of `restore` wrong before the save has returned.
        seed: of the subsets, and of the order in which reads and writes end.
        fault: see `Injector`; to leave a step out.
    """
    disk = SimulatedDisk(before)
    old = None if before is None else restore(SimulatedDisk(before), path)
    crashes = Crashes()
    stopped: list[tuple[str, str, Image]] = []
    seen: set[Any] = set()

    def collect(call: str) -> None:
        for case, image in images(disk, seed + zlib.crc32(f"{len(injector.calls)}".encode())):
            crashes.images += 1
            tree = image.tree()
            if tree not in seen:
                seen.add(tree)
                stopped.append((f"{len(injector.calls)} ({call})", case, image))

    injector = Injector(disk, fault=fault, after=collect, seed=seed)
    save(injector, path)
    new = restore(SimulatedDisk(disk.volatile), path)
    assert new != old, "a save that changes nothing proves nothing"
    running = len(stopped)
    seen.clear()
    collect("returned")
    for number, (call, case, image) in enumerate(stopped):
        crashes.different += 1
        try:
            found = restore(SimulatedDisk(image), path)
        except Exception as error:
            if before is None and number < running:
                continue
            found = error
        if not (found == new or (number < running and found == old and before is not None)):
            crashes.faults.append(f"after call {call}, {case}: {found!r:.200}")
    return crashes


def unneeded_steps(
    save: Save, restore: Restore, path: str, *, before: Image | None = None, seed: int = 0
) -> list[str]:
    """Calls that make something durable, of which no crash needs that they are made.

    Each is left out in turn; either the step is good for nothing, or the crashes do not see it.
    """
    counted = Injector(SimulatedDisk(before), seed=seed)
    save(counted, path)
    steps = [n for n, name in enumerate(counted.calls) if name in DURABILITY]
    assert steps, "this save makes nothing durable"

    def without(step: int) -> Crashes:
        def leave_out(number: int, name: str) -> int:
            return DROP if number == step else 0

        return crash_everywhere(save, restore, path, before=before, seed=seed, fault=leave_out)

    return [f"call {n}, {counted.calls[n]}" for n in steps if not without(n).faults]


def fail_everywhere(
    save: Save,
    restore: Restore,
    path: str,
    number: int,
    *,
    before: Image,
    only: frozenset[str] = CHANGES | {"open", "read", "listing", "size", "read_bytes"},
    seed: int = 0,
) -> list[str]:
    """Fail each call of a save in turn with an errno; what was wrong afterwards.

    The save either raises, and the old or the new is there, or it returns, and the new is.
    A second save on the same disk must succeed.
    """
    faults = []
    old = restore(SimulatedDisk(before), path)
    counted = Injector(SimulatedDisk(before), seed=seed)
    save(counted, path)
    new = restore(counted.inner, path)
    for at, name in enumerate(counted.calls):
        if name not in only:
            continue
        disk = SimulatedDisk(before)
        failing = Injector(disk, fault=lambda n, _, at=at: number if n == at else 0, seed=seed)  # type: ignore[misc]
        try:
            save(failing, path)
            right = [new]
        except Exception:
            right = [old, new]
        found = _found(restore, disk, path)
        if found not in right:
            faults.append(f"call {at} ({name}) failed: {found!r:.200}")
        try:
            save(disk, path)
        except Exception as error:
            faults.append(f"after call {at} ({name}) had failed: {error!r:.200}")
            continue
        found = _found(restore, disk, path)
        if found != new:
            faults.append(f"saved again after call {at} ({name}) had failed: {found!r:.200}")
    return faults


def _found(restore: Restore, disk: SimulatedDisk, path: str) -> object:
    try:
        return restore(disk, path)
    except Exception as error:
        return error
