"""Which requests a file system does best with."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from dos.bench.raw import GIB
from dos.checkpoint.storage import Storage, make_storage
from dos.checkpoint.tuning import IoShape

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
"""What a checkpoint writes at once."""
CLEARLY = 1.05
"""By which factor another shape must be faster than the usual one to be chosen."""


class Trial(NamedTuple):
    """A shape, and the size of its requests."""

    shape: IoShape
    block_bytes: int = CHUNK_BYTES


def trials(cpus: int) -> list[Trial]:
    """All that is tried, the usual one first; other sizes only to know what they would do."""
    shapes = [IoShape(), IoShape(direct=False)]
    for depth, queues in itertools.product((8, 16, 32, 64), (1, 2, 4)):
        if queues <= cpus and (shape := IoShape(depth=depth, queues=queues)) not in shapes:
            shapes.append(shape)
    sizes = [Trial(IoShape(), block_bytes) for block_bytes in (MIB, 16 * MIB)]
    return [*map(Trial, shapes), *sizes]


def tune(
    directory: str, n_bytes: int, rounds: int, progress: Callable[[int, int], None]
) -> tuple[IoShape, list[dict[str, object]]]:
    """Write and read a file in each shape, round by round, each time in another order.

    Args:
        directory: on the file system; it is there.
        n_bytes: size of the file; it is removed again.
        rounds: how often each shape is tried.
        progress: called with the files that are done, and all.

    Returns:
        The best shape for a checkpoint's chunks, by the sum of the median times to write and to
        read; and of each trial, its medians in GiB/s, the best first.
    """
    storage = make_storage()
    memory = memoryview(mmap.mmap(-1, n_bytes))
    for begin in range(0, n_bytes, MIB):
        memory[begin : begin + MIB] = random.randbytes(min(MIB, n_bytes - begin))
    path = os.path.join(directory, f"dos-tune-{os.getpid()}")
    tried = trials(len(os.sched_getaffinity(0)))
    times_s: dict[Trial, list[tuple[float, float]]] = {trial: [] for trial in tried}
    for number in range(rounds):
        for index, trial in enumerate(random.sample(tried, len(tried))):
            try:
                times_s[trial].append(_write_and_read(storage, path, memory, trial))
            finally:
                if storage.exists(path):
                    storage.unlink(path)
            progress(number * len(tried) + index + 1, rounds * len(tried))
    medians = {
        trial: [statistics.median(column) for column in zip(*times, strict=True)]
        for trial, times in times_s.items()
    }
    ranked = sorted(tried, key=lambda trial: sum(medians[trial]))
    usual, best = tried[0], next(one for one in ranked if one.block_bytes == CHUNK_BYTES)
    if sum(medians[usual]) <= CLEARLY * sum(medians[best]):
        best = usual
    figures = [
        {
            "block_bytes": trial.block_bytes,
            **trial.shape.model_dump(),
            "write_gib_per_s": round(n_bytes / GIB / medians[trial][0], 3),
            "read_gib_per_s": round(n_bytes / GIB / medians[trial][1], 3),
        }
        for trial in ranked
    ]
    return best.shape, figures


def _write_and_read(
    storage: Storage, path: str, memory: memoryview, trial: Trial
) -> tuple[float, float]:
    os.sync()
    begun_s = time.perf_counter()
    file = storage.open(path, write=True, create=True, direct=trial.shape.direct)
    try:
        storage.preallocate(file, len(memory))
        _transfer(storage, file, memory, trial, write=True)
        storage.fsync(file)
    finally:
        storage.close(file)
    written_s = time.perf_counter() - begun_s
    _forget(path)
    begun_s = time.perf_counter()
    file = storage.open(path, write=False, direct=trial.shape.direct)
    try:
        _transfer(storage, file, memory, trial, write=False)
    finally:
        storage.close(file)
    return written_s, time.perf_counter() - begun_s


def _transfer(
    storage: Storage, file: Any, memory: memoryview, trial: Trial, *, write: bool
) -> None:
    """Move all of the memory, over as many queues as the shape has."""
    block_bytes, queues = trial.block_bytes, trial.shape.queues
    errors: list[OSError] = []

    def serve(first: int) -> None:
        queue = storage.queue(depth=max(trial.shape.depth // queues, 1))
        try:
            move = queue.write if write else queue.read
            for begin in range(first * block_bytes, len(memory), block_bytes * queues):
                move(file, begin, memory[begin : begin + block_bytes], begin)
            errors.extend(error for _, error in queue.drain() if error)
        finally:
            queue.close()

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(queues)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _forget(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
