"""Fences: who still reads or writes a piece of memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Protocol

from dos.errors import PoolError

WAIT_S = 120.0
"""Default bound of a wait for memory. Longer than any transfer; a wait that reaches it is stuck."""


class Use(Protocol):
    """One use of memory, by a transfer or a kernel, on whatever runs it."""

    def done(self) -> bool:
        """Whether it has ended; returns at once."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until it has ended, at most ``timeout_s`` seconds; whether it has."""
        ...


class Fence:
    """The unfinished readers and writers of one lease. Any thread may call any method.

    A waiter waits for what was registered before its call; ended uses are forgotten, so a
    fence holds no more than what is in flight.

    Args:
        what: name of the memory it guards, for messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._lock = threading.Lock()
        self._readers: list[tuple[Use, str]] = []
        self._writers: list[tuple[Use, str]] = []

    def reading(self, use: Use, what: str = "a reader") -> None:
        """Register a reader; ``what`` names it in messages."""
        with self._lock:
            self._readers = [*_unfinished(self._readers), (use, what)]

    def writing(self, use: Use, what: str = "a writer") -> None:
        """Register a writer; ``what`` names it in messages."""
        with self._lock:
            self._writers = [*_unfinished(self._writers), (use, what)]

    def wait_readable(self, timeout_s: float = WAIT_S, what: str = "a reader") -> None:
        """Block until the writers have ended.

        Raises:
            PoolError: not within ``timeout_s`` seconds; names ``what`` waited and for whom.
        """
        with self._lock:
            writers = list(self._writers)
        self._wait_for(writers, timeout_s, what)

    def wait_writable(self, timeout_s: float = WAIT_S, what: str = "a writer") -> None:
        """Block until all readers and writers have ended.

        Raises:
            PoolError: not within ``timeout_s`` seconds; names ``what`` waited and for whom.
        """
        with self._lock:
            users = [*self._writers, *self._readers]
        self._wait_for(users, timeout_s, what)

    def _wait_for(self, users: Iterable[tuple[Use, str]], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        for use, user in users:
            if not use.wait(max(0.0, deadline - time.monotonic())):
                raise PoolError(
                    f"{what} waited {timeout_s:g} s for {user}, which has not ended",
                    where=self.what,
                    fix="look for a stalled transfer or disk; the memory was not touched",
                )
        with self._lock:
            self._readers = _unfinished(self._readers)
            self._writers = _unfinished(self._writers)


def _unfinished(users: list[tuple[Use, str]]) -> list[tuple[Use, str]]:
    return [(use, what) for use, what in users if not use.done()]
