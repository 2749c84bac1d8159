"""What a pool of threads promises, and one made of Python threads for want of the compiled one."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class ThreadPool(Protocol):
    """Threads that share the work of a call with its caller, as `_native.ThreadPool` does."""

    @property
    def threads(self) -> int:
        """Threads that work on one call, its caller included."""

    def run(self, n_tasks: int, fn: Callable[[int], object]) -> None:
        """Call ``fn(i)`` for every i below ``n_tasks``, in any order, on any thread.

        The first exception is raised here, after the calls in progress have ended; calls
        not begun by then are left out.
        """

    def close(self) -> None:
        """End the workers and wait for them; a second call does nothing."""


class PythonPool:
    """A `ThreadPool` of Python threads: of use where ``fn`` works without the GIL.

    Safe to use from several threads at once. In a forked child, after `close`, and while the
    interpreter exits, all work runs on the caller. Workers start when first needed.

    Args:
        threads: how many work on one call, its caller included; None: as many as the
            affinity mask and the CPU quota of this container allow.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = _default_thread_count() if threads is None else threads
        self._pid = os.getpid()
        n_workers = max(1, self.threads - 1)
        self._workers = ThreadPoolExecutor(n_workers, "dos-update")
        # Bounds the executor's queue when the workers are long with another caller's tasks.
        self._seats = threading.Semaphore(n_workers)

    def run(self, n_tasks: int, fn: Callable[[int], object]) -> None:
        """See `ThreadPool.run`."""
        job = _Job(n_tasks, fn)
        # A forked child has none of the workers, and their queue's lock may be held for good.
        if os.getpid() == self._pid:
            with suppress(RuntimeError):  # closed, or the interpreter exits
                for _ in range(min(self.threads, n_tasks) - 1):
                    if self._seats.acquire(blocking=False):
                        self._workers.submit(self._help, job)
        try:
            job.work()
        finally:
            job.end()

    def close(self) -> None:
        """See `ThreadPool.close`."""
        if os.getpid() == self._pid:
            self._workers.shutdown(wait=True)

    def _help(self, job: _Job) -> None:
        self._seats.release()
        job.work()


class _Job:
    """The tasks of one call, taken one by one by whoever works on it."""

    def __init__(self, n_tasks: int, fn: Callable[[int], object]) -> None:
        self._error: BaseException | None = None
        self._next, self._n_tasks, self._fn = 0, n_tasks, fn
        self._under_way = 0
        self._ended = threading.Condition()

    def work(self) -> None:
        while (i := self._take()) is not None:
            try:
                self._fn(i)
            except BaseException as error:
                self._stop(error)
            finally:
                self._finish()

    def end(self) -> None:
        """Let nobody begin another task, wait for those under way, and raise the first error."""
        with self._ended:
            self._n_tasks = 0
            self._ended.wait_for(lambda: not self._under_way)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which refers to this frame: a circle that would hold its arrays

    def _stop(self, error: BaseException) -> None:
        with self._ended:
            self._n_tasks = 0
            self._error = self._error or error

    def _finish(self) -> None:
        with self._ended:
            self._under_way -= 1
            self._ended.notify()

    def _take(self) -> int | None:
        with self._ended:
            if self._next >= self._n_tasks:
                return None
            self._under_way += 1
            self._next += 1
            return self._next - 1


def _default_thread_count() -> int:
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        allowed = os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no cgroup v2, or the quota "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        allowed = min(allowed, math.ceil(quota / period))
    return max(1, allowed)
