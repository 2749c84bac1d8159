"""The thread pools: share tasks, pass errors on, leave no threads, survive a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dos.errors import ConfigError
from dos.kernels import adam
from dos.kernels.thread_pool import PythonPool, ThreadPool

THREADS = 3
TASKS = Path("/proc/self/task")


@pytest.fixture(params=[adam.make_pool, PythonPool])
def make_pool(request: pytest.FixtureRequest) -> Callable[[int | None], ThreadPool]:
    """The pool of this build, and the one of builds without the extension."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pool(make_pool: Callable[[int | None], ThreadPool]) -> Iterator[ThreadPool]:
    made = make_pool(THREADS)
    yield made
    made.close()


def test_every_task_runs_once(pool: ThreadPool) -> None:
    seen: Counter[int] = Counter()
    pool.run(1000, lambda i: seen.update([i]))
    assert seen == Counter(range(1000))


def test_workers_and_the_caller_share_the_tasks(pool: ThreadPool) -> None:
    # Each task waits for the others, so that they must all run at the same time.
    barrier = threading.Barrier(THREADS, timeout=60)
    idents = []

    def task(i: int) -> None:
        barrier.wait()
        idents.append(threading.get_ident())

    pool.run(THREADS, task)
    assert len(set(idents)) == THREADS


def test_an_exception_reaches_the_caller(pool: ThreadPool) -> None:
    def task(i: int) -> None:
        if i == 5:
            raise KeyError("the fifth")

    with pytest.raises(KeyError, match="the fifth"):
        pool.run(100, task)


def test_an_exception_stops_what_has_not_begun(pool: ThreadPool) -> None:
    begun = []

    def task(i: int) -> None:
        begun.append(i)
        raise KeyError

    with pytest.raises(KeyError):
        pool.run(1000, task)
    assert len(begun) <= THREADS


def test_a_pool_works_on_after_an_exception(pool: ThreadPool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.run(100, lambda i: 1 // 0)
    seen: list[int] = []
    pool.run(10, seen.append)
    assert sorted(seen) == list(range(10))


def test_several_callers_at_once_each_get_all_their_tasks(pool: ThreadPool) -> None:
    seen: list[list[int]] = [[] for _ in range(6)]

    def call(mine: list[int]) -> None:
        for _ in range(20):
            pool.run(10, mine.append)

    callers = [threading.Thread(target=call, args=(mine,)) for mine in seen]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [Counter(mine) for mine in seen] == [Counter(dict.fromkeys(range(10), 20))] * 6


def test_a_caller_in_a_task_of_the_same_pool_does_not_wait_forever(pool: ThreadPool) -> None:
    seen: list[int] = []
    pool.run(4, lambda i: pool.run(5, seen.append))
    assert Counter(seen) == Counter(dict.fromkeys(range(5), 4))


@pytest.mark.skipif(not TASKS.exists(), reason="needs /proc")
def test_closing_ends_the_workers(pool: ThreadPool) -> None:
    barrier = threading.Barrier(THREADS, timeout=60)
    pool.run(THREADS, lambda i: barrier.wait())  # a pool may wait with its workers until now
    with_workers = len(list(TASKS.iterdir()))
    pool.close()
    # A joined thread leaves /proc a moment after.
    deadline = time.monotonic() + 10
    gone = 0
    while gone < THREADS - 1 and time.monotonic() < deadline:
        gone = with_workers - len(list(TASKS.iterdir()))
    assert gone == THREADS - 1


def test_a_closed_pool_works_on_its_caller(pool: ThreadPool) -> None:
    pool.close()
    idents = []
    pool.run(10, lambda i: idents.append(threading.get_ident()))
    assert idents == [threading.get_ident()] * 10


def in_a_child(work: object) -> int:
    """The exit code of a forked child that calls ``work``; 1 if it raises, -1 if it hangs."""
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
            os._exit(0)
        except BaseException:
            os._exit(1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_works_on_its_caller(pool: ThreadPool) -> None:
    def work() -> None:
        idents: set[int] = set()
        pool.run(10, lambda i: idents.add(threading.get_ident()))
        assert idents == {threading.get_ident()}

    assert in_a_child(work) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_drop_the_pool(
    make_pool: Callable[[int | None], ThreadPool],
) -> None:
    holder = [make_pool(THREADS)]
    holder[0].run(THREADS, str)
    assert in_a_child(holder.clear) == 0


AT_WORK_AT_EXIT = """
import threading
import numpy as np
from dos.kernels import _native, adam
from dos.kernels.scalars import AdamScalars, DType, Segment

pool = _native.ThreadPool(3)
memory = np.ones((4, 1 << 20), np.float32)
p, m, v, g = (row.ctypes.data for row in memory)
scalars = AdamScalars.at_step(
    lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, decoupled=True
)
segment = Segment(p, m, v, g, 0, 1 << 20, DType.FP32, DType.NONE, scalars)
begun = threading.Event()

def nothing():
    pass

def update():
    adam.update([segment], pool=pool)

def tasks():
    pool.run(6, lambda i: sum(range(3000)))

def work():
    while True:
        WORK()
        begun.set()

threading.Thread(target=work, daemon=True).start()
begun.wait(60)
"""


@pytest.mark.parametrize("work", ["nothing", "update", "tasks"])
def test_the_interpreter_ends_while_a_pool_is_at_work(pool: ThreadPool, work: str) -> None:
    code = AT_WORK_AT_EXIT.replace("WORK", work)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_pool_counts_its_caller(pool: ThreadPool) -> None:
    assert pool.threads == THREADS


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs an affinity mask")
def test_the_default_count_follows_the_affinity_mask(
    make_pool: Callable[[int | None], ThreadPool],
) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        made = make_pool(None)
    finally:
        os.sched_setaffinity(0, allowed)
    assert made.threads == 1


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot work"):
        adam.make_pool(0)
