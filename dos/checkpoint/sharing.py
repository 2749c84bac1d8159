"""Chunks shared out over threads, which spend their time without the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from dos.checkpoint.tuning import IoShape

_THREADS = 2
"""At least: first touch of fresh memory, copies and checksums take a core of a fast disk's time."""


def threads_and_depth(shape: IoShape) -> tuple[int, int]:
    """How many threads, and how many requests each has in flight."""
    threads = max(_THREADS, shape.queues)
    return threads, max(2, shape.depth // threads)


def share_out(work: Callable[[Iterator[int]], None], chunks: Sequence[int], threads: int) -> None:
    """Do work on chunks on this thread and others; the first failure is raised.

    Each takes the next chunk when it is ready for it, so that none waits at the end for one
    that was kept from running.

    Args:
        work: is given the chunks that its thread takes; they end early once another failed.
        chunks: all of them.
        threads: how many, this one included.
    """
    errors: list[BaseException] = []
    waiting, lock = iter(chunks), threading.Lock()

    def take() -> int | None:
        with lock:
            return None if errors else next(waiting, None)

    def run() -> None:
        try:
            work(iter(take, None))
        except BaseException as error:
            errors.append(error)

    threads = min(threads, len(chunks))
    others = [threading.Thread(target=run, daemon=True) for _ in range(threads - 1)]
    with suppress(RuntimeError):  # at the end of the process there are no new ones
        for other in others:
            other.start()
    if threads:
        run()
    for other in others:
        if other.ident is not None:
            other.join()
    if errors:
        raise errors[0]
