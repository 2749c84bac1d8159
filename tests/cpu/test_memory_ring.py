"""The ring: back-pressure, order, pieces, and nothing lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dos.errors import PoolError
from dos.memory import Pool, Ring, RingLease

PAGE = 4096


def ring_of(pages: int) -> Ring:
    return Pool(state_bytes=0, gradient_bytes=0, ring_bytes=pages * PAGE).ring


class Waiter:
    """A thread that acquires, and what came of it."""

    def __init__(
        self, ring: Ring, n_bytes: int, what: str = "waiter", timeout_s: float = 60.0
    ) -> None:
        self.lease: RingLease | None = None
        self.error: PoolError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(ring, n_bytes, what, timeout_s), daemon=True
        )
        before = len(ring._waiting)
        self._thread.start()
        until(lambda: len(ring._waiting) > before or not self._thread.is_alive())

    def _run(self, ring: Ring, n_bytes: int, what: str, timeout_s: float) -> None:
        try:
            self.lease = ring.acquire(n_bytes, what, timeout_s)
        except PoolError as error:
            self.error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Waiter:
        self._thread.join(10.0)
        assert not self.waits
        return self


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_lease_is_aligned_to_pages() -> None:
    ring = ring_of(4)
    ring.acquire(1, "a")
    assert ring.acquire(1, "b").address % PAGE == 0


def test_acquire_blocks_while_the_ring_is_full() -> None:
    ring = ring_of(2)
    ring.acquire(2 * PAGE, "holder")
    waiter = Waiter(ring, PAGE)
    time.sleep(0.05)
    assert waiter.waits
    ring.close()


def test_release_lets_the_waiter_go_on() -> None:
    ring = ring_of(2)
    held = ring.acquire(2 * PAGE, "holder")
    waiter = Waiter(ring, PAGE)
    held.release()
    assert waiter.join().lease is not None


def test_end_of_the_with_block_releases() -> None:
    ring = ring_of(2)
    with ring.acquire(2 * PAGE, "holder"):
        pass
    assert ring.used_bytes == 0


def test_release_is_idempotent() -> None:
    ring = ring_of(2)
    first = ring.acquire(PAGE, "first")
    first.release()
    ring.acquire(PAGE, "second")
    first.release()
    assert ring.used_bytes == PAGE


def test_released_lease_gives_no_tensor() -> None:
    lease = ring_of(1).acquire(PAGE, "gone")
    lease.release()
    with pytest.raises(PoolError, match="released"):
        lease.tensor(torch.uint8)


def test_leases_are_released_in_any_order() -> None:
    ring = ring_of(4)
    leases = [ring.acquire(PAGE, str(i)) for i in range(4)]
    for i in (2, 0, 3, 1):
        leases[i].release()
    assert ring.acquire(4 * PAGE, "all").n_bytes == 4 * PAGE


class Endless:
    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> bool:
        return False


def test_release_keeps_memory_that_is_still_read() -> None:
    ring = ring_of(1)
    lease = ring.acquire(PAGE, "copied from")
    lease.fence.reading(Endless(), "the link")
    with pytest.raises(PoolError, match="the link"):
        lease.release(timeout_s=0.01)
    assert ring.used_bytes == PAGE


def timeout_error(ring: Ring) -> str:
    with pytest.raises(PoolError) as caught:
        ring.acquire(2 * PAGE, "capture of embed.weight", timeout_s=0.02)
    return str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        "capture of embed.weight (8,192 bytes (8.0 KiB)) waited 0.02 s",
        "4,096 bytes (4.0 KiB) of 16,384 bytes (16.0 KiB) are free",
        "staging of subgroup 7 (12,288 bytes (12.0 KiB))",
    ],
    ids=["waiter", "free", "holder"],
)
def test_timeout_names_the(part: str) -> None:
    ring = ring_of(4)
    ring.acquire(3 * PAGE, "staging of subgroup 7")
    assert part in timeout_error(ring)


def test_timeout_of_a_later_waiter_names_the_first() -> None:
    ring = ring_of(4)
    ring.acquire(PAGE, "holder")
    Waiter(ring, 4 * PAGE, "the large one")
    assert "first in the queue: the large one" in timeout_error(ring)
    ring.close()


def test_many_holders_are_not_all_listed() -> None:
    ring = ring_of(20)
    for i in range(20):
        ring.acquire(PAGE, f"holder {i}")
    assert "12 more" in timeout_error(ring)


def test_waiter_that_gave_up_does_not_block_the_next() -> None:
    ring = ring_of(2)
    ring.acquire(PAGE, "holder")
    timeout_error(ring)
    assert ring.acquire(PAGE, "next", timeout_s=0.0).n_bytes == PAGE


def test_waiter_that_gave_up_wakes_the_next() -> None:
    ring = ring_of(2)
    ring.acquire(PAGE, "holder")
    Waiter(ring, 2 * PAGE, "gives up", timeout_s=0.1)
    assert Waiter(ring, PAGE, "next").join().lease is not None


def test_waiter_that_was_served_wakes_the_next() -> None:
    ring = ring_of(2)
    held = ring.acquire(2 * PAGE, "holder")
    waiters = [Waiter(ring, PAGE, "one"), Waiter(ring, PAGE, "two")]
    held.release()
    assert all(waiter.join().lease is not None for waiter in waiters)


def test_small_requests_do_not_overtake_a_large_one() -> None:
    ring = ring_of(4)
    held = ring.acquire(PAGE, "holder")
    large = Waiter(ring, 4 * PAGE, "large")
    small = Waiter(ring, PAGE, "small")
    time.sleep(0.05)
    assert (large.waits, small.waits) == (True, True)
    held.release()
    large.join()
    ring.close()


def test_waiters_are_served_in_their_order() -> None:
    ring = ring_of(1)
    held = ring.acquire(PAGE, "holder")
    waiters = [Waiter(ring, PAGE, str(i)) for i in range(4)]
    served = []
    for waiter in waiters:
        held.release()
        lease = waiter.join().lease
        assert lease is not None
        held = lease
        served.append(lease.what)
    assert served == ["0", "1", "2", "3"]


def test_request_larger_than_the_ring_is_pointed_to_pieces() -> None:
    with pytest.raises(PoolError, match="acquire_pieces"):
        ring_of(2).acquire(2 * PAGE + 1, "large", timeout_s=0.0)


def test_pieces_cover_a_request_larger_than_the_ring() -> None:
    ring = ring_of(4)
    sizes = []
    for piece in ring.acquire_pieces(11 * PAGE + 5, "large", timeout_s=1.0):
        with piece:
            sizes.append(piece.n_bytes)
    assert sizes == [2 * PAGE] * 5 + [PAGE + 5]


def test_pieces_are_no_larger_than_asked_for() -> None:
    ring = ring_of(4)
    sizes = []
    for piece in ring.acquire_pieces(5 * PAGE, "large", largest_bytes=3 * PAGE, timeout_s=1.0):
        with piece:
            sizes.append(piece.n_bytes)
    assert sizes == [3 * PAGE, 2 * PAGE]


def test_pieces_work_in_a_ring_of_one_page() -> None:
    ring = ring_of(1)
    count = 0
    for piece in ring.acquire_pieces(3 * PAGE, "large", largest_bytes=9 * PAGE, timeout_s=1.0):
        piece.release()
        count += 1
    assert count == 3


def test_no_bytes_need_no_pieces() -> None:
    assert list(ring_of(1).acquire_pieces(0, "nothing")) == []


def test_two_streams_of_pieces_do_not_block_each_other() -> None:
    ring = ring_of(4)
    done = []

    def consume(what: str) -> None:
        for piece in ring.acquire_pieces(40 * PAGE, what, largest_bytes=3 * PAGE, timeout_s=10.0):
            threading.Timer(0.001, piece.release).start()
        done.append(what)

    threads = [threading.Thread(target=consume, args=(what,)) for what in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sorted(done) == ["a", "b"]


def test_close_wakes_waiters_with_an_error() -> None:
    pool = Pool(state_bytes=0, gradient_bytes=0, ring_bytes=PAGE)
    pool.ring.acquire(PAGE, "holder")
    waiter = Waiter(pool.ring, PAGE)
    pool.close()
    assert "the pool was closed" in str(waiter.join().error)


def test_high_water_mark_is_kept() -> None:
    ring = ring_of(4)
    ring.acquire(3 * PAGE, "a").release()
    ring.acquire(PAGE, "b")
    assert ring.peak_bytes == 3 * PAGE


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(0, 9 * PAGE)),
        st.tuples(st.just("release"), st.integers(0, 100)),
    ),
    max_size=60,
)


def play(ring: Ring, steps: list[tuple[str, int]]) -> list[RingLease]:
    """Acquire and release as told; each time, nothing may overlap or leave the region."""
    held: list[RingLease] = []
    first = ring._slab.address + ring._offset_bytes
    for verb, number in steps:
        if verb == "release":
            if held:
                held.pop(number % len(held)).release()
            continue
        try:
            held.append(ring.acquire(number, "x", timeout_s=0.0))
        except PoolError:
            continue
        spans = sorted((lease.address, max(lease.n_bytes, 1)) for lease in held)
        ends = [first, *(address + n_bytes for address, n_bytes in spans)]
        starts = [*(address for address, _ in spans), first + ring.capacity_bytes]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
    return held


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_leases_never_overlap_or_grow_and_free_space_coalesces(
    steps: list[tuple[str, int]],
) -> None:
    ring = ring_of(8)
    for lease in play(ring, steps):
        lease.release()
    assert ring.acquire(8 * PAGE, "all", timeout_s=0.0).n_bytes == 8 * PAGE


def test_threads_that_share_the_ring_never_see_each_others_bytes() -> None:
    ring = ring_of(6)
    spoiled = []

    def work(mark: int) -> None:
        for i in range(60):
            with ring.acquire((i % 5 + 1) * PAGE, f"thread {mark}", timeout_s=20.0) as lease:
                tensor = lease.tensor(torch.uint8).fill_(mark)
                time.sleep(0)
                if not bool((tensor == mark).all()):
                    spoiled.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert (spoiled, ring.used_bytes) == ([], 0)
