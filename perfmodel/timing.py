"""How fast pieces of work run: alone, and beside each other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

LEAST_RUNS, MOST_RUNS = 3, 10_000
"""Runs that count: of every work at least, and at most of the one that makes the most."""

START_S = 60.0
"""Longest wait for the others' first run, in seconds."""


@dataclass(frozen=True, slots=True)
class Work:
    """`units` of something done by each `run`, which returns when they are done."""

    units: float
    run: Callable[[], object]


def rates(works: Sequence[Work], window_s: float) -> list[float]:
    """Units per second of each work while all of them run, each on a thread of its own.

    By the median run, after a first one that does not count. All go on until the window is
    over, or one has made `MOST_RUNS`; but not before each has made `LEAST_RUNS`.

    Args:
        works: at least one.
        window_s: seconds.

    Raises:
        Exception: what a run raises first; the others end after the run they are in.
    """
    race = _Race(len(works), window_s)
    with ThreadPoolExecutor(len(works), "dos-calibrate") as threads:
        futures = [threads.submit(race.repeat, i, work.run) for i, work in enumerate(works)]
        runs_s = [future.result() for future in futures]
    return [work.units / median(times_s) for work, times_s in zip(works, runs_s, strict=True)]


class _Race:
    def __init__(self, n_works: int, window_s: float) -> None:
        self._start = threading.Barrier(n_works, action=self._begin)
        self._window_s, self._begin_s = window_s, 0.0
        self._runs = [0] * n_works
        self._failed = False

    def repeat(self, index: int, run: Callable[[], object]) -> Sequence[float]:
        """Seconds of each run of one work; empty if another work failed."""
        times_s: deque[float] = deque(maxlen=MOST_RUNS)
        try:
            run()
            self._start.wait(START_S)
            while not self._over():
                started_s = time.perf_counter()
                run()
                times_s.append(time.perf_counter() - started_s)
                self._runs[index] += 1
        except threading.BrokenBarrierError:
            if not self._failed:
                raise TimeoutError(f"no first run within {START_S:.0f} s") from None
        except BaseException:
            self._failed = True
            self._start.abort()
            raise
        return times_s

    def _begin(self) -> None:
        self._begin_s = time.perf_counter()

    def _over(self) -> bool:
        if self._failed:
            return True
        late = time.perf_counter() - self._begin_s >= self._window_s
        return min(self._runs) >= LEAST_RUNS and (late or max(self._runs) >= MOST_RUNS)
