"""Chunks shared out over threads, which spend their time without the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dos.checkpoint.tuning import IoShape

_THREADS = 2
"""At least: first touch of fresh memory, copies and checksums take a core of a fast disk's time."""

Stop = Callable[[], bool]
"""Has another thread failed, so that going on is for nothing?"""


def threads_and_depth(shape: IoShape) -> tuple[int, int]:
    """How many threads, and how many requests each has in flight."""
    threads = max(_THREADS, shape.queues)
    return threads, max(2, shape.depth // threads)


def share_out(
    work: Callable[[Sequence[int], Stop], None], chunks: Sequence[int], threads: int
) -> None:
    """Do work on chunks, in turns, on this thread and others; the first failure is raised.

    Args:
        work: is given some of the chunks, ascending, and should return early once told to stop.
        chunks: all of them.
        threads: how many, this one included.
    """
    errors: list[BaseException] = []

    def run(part: Sequence[int]) -> None:
        try:
            work(part, lambda: bool(errors))
        except BaseException as error:
            errors.append(error)

    parts = [part for first in range(threads) if (part := chunks[first::threads])]
    others = [threading.Thread(target=run, args=(part,), daemon=True) for part in parts[1:]]
    here = parts[:1]
    for other, part in zip(others, parts[1:], strict=True):
        try:
            other.start()
        except RuntimeError:  # at the end of the process there are no new ones
            here.append(part)
    for part in here:
        run(part)
    for other in others:
        if other.ident is not None:
            other.join()
    if errors:
        raise errors[0]
