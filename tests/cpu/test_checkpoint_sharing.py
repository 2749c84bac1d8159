"""Chunks shared out over threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dos.checkpoint.sharing import share_out

LIMIT_S = 60


def test_a_thread_that_is_held_up_leaves_its_chunks_to_the_other() -> None:
    done: list[int] = []
    rest = threading.Event()

    def work(chunks: Iterator[int]) -> None:
        for chunk in chunks:
            if chunk == 0:
                assert rest.wait(LIMIT_S)
            done.append(chunk)
            if len(done) == 9:
                rest.set()

    share_out(work, range(10), 2)
    assert sorted(done) == list(range(10))


def test_a_failure_is_raised_and_ends_the_others_chunks() -> None:
    taken: list[int] = []

    def work(chunks: Iterator[int]) -> None:
        for chunk in chunks:
            taken.append(chunk)
            raise OSError(chunk)

    with pytest.raises(OSError, match=r"0|1"):
        share_out(work, range(100), 2)
    assert len(taken) <= 2


@pytest.mark.parametrize("count", [0, 1])
def test_few_chunks_need_few_threads(count: int) -> None:
    threads: set[int] = set()

    def work(chunks: Iterator[int]) -> None:
        threads.add(threading.get_ident())
        assert list(chunks) == [0]

    share_out(work, range(count), 4)
    assert len(threads) == count
