"""Who does which task, and on which CPUs: seats, stealing, pinning, NUMA nodes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dos.kernels import adam
from dos.kernels.scalars import DType
from tests.cpu import adam_cases as cases

if TYPE_CHECKING:
    from dos.kernels._native import ThreadPool

native = pytest.importorskip("dos.kernels._native", reason="needs the compiled extension")

WAIT_S = 60
EVERY_POLICY = {
    "unbound": {"nodes": [[0, 1]]},
    "pinned": {"pin": True},
    "two nodes": {"nodes": [[0], [1]]},
    "a CPU that nobody has": {"nodes": [[0], [60_000]]},
    "numbers that are none": {"nodes": [[-1], [1 << 30]], "pin": True},
}
every_policy = pytest.mark.parametrize(
    "policy", EVERY_POLICY.values(), ids=[name.replace(" ", "-") for name in EVERY_POLICY]
)


@pytest.fixture
def make() -> Iterator[Callable[..., ThreadPool]]:
    """Makes pools that are closed in the end."""
    made = []

    def make_one(threads: int, **options: object) -> ThreadPool:
        made.append(native.ThreadPool(threads, **options))
        return made[-1]

    yield make_one
    for pool in made:
        pool.close()


def mask() -> frozenset[int]:
    """The CPUs that the calling thread may use."""
    return frozenset(os.sched_getaffinity(threading.get_native_id()))


def masks_of(pool: ThreadPool) -> dict[int, frozenset[int]]:
    """The mask of every thread of a pool during a call, by thread; the caller's first."""
    barrier = threading.Barrier(pool.threads, timeout=WAIT_S)
    seen: dict[int, frozenset[int]] = {threading.get_ident(): frozenset()}

    def look(i: int) -> None:
        barrier.wait()
        seen[threading.get_ident()] = mask()

    pool.run(pool.threads, look)
    return seen


@every_policy
def test_each_thread_does_the_tasks_of_its_seat_in_order(
    make: Callable[..., ThreadPool], policy: dict[str, object]
) -> None:
    # All are in a task at the same time, again and again, so that nobody runs out before
    # the others do.
    barrier = threading.Barrier(3, timeout=WAIT_S)
    done: dict[int, list[int]] = {}

    def task(i: int) -> None:
        barrier.wait()
        done.setdefault(threading.get_ident(), []).append(i)
        barrier.wait()

    make(3, **policy).run(12, task)
    assert done[threading.get_ident()] == [0, 1, 2, 3]
    assert sorted(done.values()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("stuck", [0, 4])
def test_the_others_take_the_tasks_of_a_seat_that_is_held_up(
    make: Callable[..., ThreadPool], stuck: int
) -> None:
    rest_done = threading.Event()
    done: list[int] = []
    came_on: list[bool] = []

    def task(i: int) -> None:
        if i == stuck:
            came_on.append(rest_done.wait(WAIT_S))
            return
        done.append(i)
        if len(done) == 7:
            rest_done.set()

    make(2).run(8, task)
    assert came_on == [True]
    assert sorted(done) == [i for i in range(8) if i != stuck]


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n_tasks", [0, 1, 2, 3, 7, 100])
def test_every_task_runs_once_with_any_numbers(
    make: Callable[..., ThreadPool], threads: int, n_tasks: int
) -> None:
    seen: Counter[int] = Counter()
    make(threads).run(n_tasks, lambda i: seen.update([i]))
    assert seen == Counter(range(n_tasks))


def test_on_one_node_nothing_is_bound(make: Callable[..., ThreadPool]) -> None:
    pool = make(3, nodes=[sorted(os.sched_getaffinity(0))])
    assert set(masks_of(pool).values()) == {mask()}


def test_a_pool_takes_the_nodes_of_this_machine(make: Callable[..., ThreadPool]) -> None:
    seats = native.seat_cpus(3, native.numa_nodes(), False)
    expected = Counter(frozenset(cpus) or mask() for cpus in seats)
    assert Counter(masks_of(make(3)).values()) == expected


@pytest.mark.parametrize("threads", [2, 3])
def test_pinned_threads_have_a_cpu_each(make: Callable[..., ThreadPool], threads: int) -> None:
    seats = native.seat_cpus(threads, native.numa_nodes(), True)
    seen = list(masks_of(make(threads, pin=True)).values())
    assert seen[0] == set(seats[0])
    assert sorted(map(sorted, seen)) == sorted(seats)


def test_threads_are_bound_to_the_cpus_of_their_node(make: Callable[..., ThreadPool]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two CPUs, to make a node of each")
    nodes = [allowed[:1], allowed[1:]]
    seats = native.seat_cpus(3, nodes, False)
    assert sorted(map(sorted, masks_of(make(3, nodes=nodes)).values())) == sorted(seats)


@every_policy
def test_the_callers_mask_is_back_after_a_call(
    make: Callable[..., ThreadPool], policy: dict[str, object]
) -> None:
    before = mask()
    masks_of(make(2, **policy))
    assert mask() == before


def test_the_callers_mask_is_back_after_an_exception(make: Callable[..., ThreadPool]) -> None:
    before = mask()
    with pytest.raises(ZeroDivisionError):
        make(2, pin=True).run(4, lambda i: 1 // 0)
    assert mask() == before


def test_a_mask_that_the_caller_had_narrowed_is_kept(make: Callable[..., ThreadPool]) -> None:
    before = os.sched_getaffinity(0)
    pool = make(2, pin=True)
    os.sched_setaffinity(0, {max(before)})
    try:
        masks_of(pool)
        assert mask() == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_a_second_caller_is_not_bound(make: Callable[..., ThreadPool]) -> None:
    before = mask()
    pool = make(2, pin=True)
    first_is_in, second_is_out = threading.Event(), threading.Event()
    came_on: list[bool] = []

    def hold(i: int) -> None:
        first_is_in.set()
        came_on.append(second_is_out.wait(WAIT_S))

    first = threading.Thread(target=pool.run, args=(2, hold))
    first.start()
    came_on.append(first_is_in.wait(WAIT_S))
    seen: set[frozenset[int]] = set()
    pool.run(4, lambda i: seen.add(mask()))  # alone: the worker is held up
    second_is_out.set()
    first.join()
    assert seen == {before}
    assert came_on == [True] * 3


@every_policy
def test_several_callers_at_once_all_end_with_their_mask(
    make: Callable[..., ThreadPool], policy: dict[str, object]
) -> None:
    pool = make(3, **policy)
    before = mask()
    after: list[frozenset[int]] = []

    def call() -> None:
        for _ in range(20):
            pool.run(6, lambda i: None)
        after.append(mask())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert after == [before] * 4


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@every_policy
def test_the_bits_of_an_update_depend_on_no_policy(
    make: Callable[..., ThreadPool], threads: int, policy: dict[str, object]
) -> None:
    scalars = cases.AdamScalars.at_step(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, decoupled=True
    )
    arrays = cases.random_arrays(1, 300_001, DType.BF16, DType.BF16, (1, 2, 3, 4, 5))
    result, alone = arrays.copy(), arrays.copy()
    adam.update([result.segment(scalars)], pool=make(threads, **policy))
    adam.update([alone.segment(scalars)])
    assert np.array_equal(
        np.frombuffer(result.canonical(), np.uint8), np.frombuffer(alone.canonical(), np.uint8)
    )
