"""Fences: writers wait for readers, readers for writers."""

from __future__ import annotations

import threading

import pytest

from dos.errors import PoolError
from dos.memory import Fence


class Flag:
    """An event that ends when told to."""

    def __init__(self) -> None:
        self._flag = threading.Event()

    def end(self) -> None:
        self._flag.set()

    def done(self) -> bool:
        return self._flag.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._flag.wait(timeout_s)


@pytest.fixture
def fence() -> Fence:
    return Fence("master of subgroup 3")


def test_untouched_memory_is_writable(fence: Fence) -> None:
    fence.wait_writable(0.0)  # raises where it would have to wait


def test_writer_waits_for_every_reader(fence: Fence) -> None:
    first, second = Flag(), Flag()
    fence.reading(first)
    fence.reading(second)
    first.end()
    with pytest.raises(PoolError):
        fence.wait_writable(0.02)


def test_writer_goes_on_when_the_readers_end(fence: Fence) -> None:
    event = Flag()
    fence.reading(event)
    threading.Timer(0.05, event.end).start()
    fence.wait_writable(10.0)
    assert event.done()


def test_writer_waits_for_the_writer_before_it(fence: Fence) -> None:
    fence.writing(Flag())
    with pytest.raises(PoolError):
        fence.wait_writable(0.02)


def test_reader_waits_for_the_writer(fence: Fence) -> None:
    fence.writing(Flag())
    with pytest.raises(PoolError):
        fence.wait_readable(0.02)


def test_reader_does_not_wait_for_readers(fence: Fence) -> None:
    fence.reading(Flag())
    fence.wait_readable(0.0)  # raises where it would have to wait


def test_timeout_names_the_waiter_the_user_and_the_memory(fence: Fence) -> None:
    fence.reading(Flag(), "checkpoint 12")
    with pytest.raises(PoolError) as caught:
        fence.wait_writable(0.02, "FLUSH of subgroup 3")
    assert str(caught.value).startswith(
        "master of subgroup 3: FLUSH of subgroup 3 waited 0.02 s for checkpoint 12"
    )


def test_ended_events_are_forgotten(fence: Fence) -> None:
    for _ in range(100):
        event = Flag()
        event.end()
        fence.reading(event)
    assert len(fence._readers) == 1


def test_timeout_bounds_the_wait_for_all_users_together(fence: Fence) -> None:
    class Slow(Flag):
        asked_s: list[float] = []  # noqa: RUF012

        def wait(self, timeout_s: float) -> bool:
            self.asked_s.append(timeout_s)
            threading.Event().wait(0.03)
            return True

    for _ in range(3):
        fence.reading(Slow())
    fence.wait_writable(1.0)
    assert Slow.asked_s[2] < Slow.asked_s[1] < Slow.asked_s[0] <= 1.0
