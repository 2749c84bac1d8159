"""Gates: subgroups whose memory may not change yet, because it is being captured."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from dos.errors import PoolError

WAIT_S = 600.0
"""Default bound of a wait, in seconds, in which no gate opens: a capture as slow as that hangs."""


class Gates:
    """One gate per subgroup, closed while a capture reads it. Any thread may call any method.

    A capture closes the gates of what it will read, all at once, and opens each when that
    subgroup is captured. Several captures may hold one gate; it is open when none does. A step
    that is under way when a gate is closed does not heed it: the capture is of what that step
    leaves.

    Args:
        timeout_s: how long a waiter waits, at most, without any gate opening.
    """

    def __init__(self, timeout_s: float = WAIT_S) -> None:
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._holders: dict[int, dict[int, str]] = {}  # by subgroup: the closings, and for whom
        self._closings = 0
        self._openings = 0
        self._waited_s = 0.0
        self._listeners: list[Callable[[], None]] = []

    @property
    def closings(self) -> int:
        """Number of times that gates were closed: `until`, for who begins now."""
        return self._closings

    @property
    def waited_s(self) -> float:
        """Seconds that steps and other writers were held back by closed gates, in all."""
        return self._waited_s

    def close(self, indices: Iterable[int], what: str) -> int:
        """Close the gates of these subgroups for `what`; returns what to open them with."""
        with self._changed:
            self._closings += 1
            for index in indices:
                self._holders.setdefault(index, {})[self._closings] = what
            return self._closings

    def open(self, closing: int, index: int | None = None) -> None:
        """Take back a closing of one subgroup, or of all that are left of it. Idempotent."""
        if os.getpid() != self._pid:
            return  # a forked child, which may have inherited the lock as it was held
        with self._changed:
            for one in list(self._holders) if index is None else [index]:
                holders = self._holders.get(one, {})
                if holders.pop(closing, None) is not None and not holders:
                    del self._holders[one]
                    self._openings += 1
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listener in listeners:
            listener()

    def is_open(self, index: int, until: int | None = None) -> bool:
        """Whether no capture holds the subgroup; `until`: none of the first so many closings."""
        holders = self._holders.get(index)
        if not holders:
            return True
        with self._changed:
            return not any(until is None or its <= until for its in list(holders))

    def wait(self, what: str, indices: Iterable[int] | None = None) -> None:
        """Block until the gates of these subgroups are open; None for all.

        Raises:
            PoolError: no gate opened for `timeout_s`; names what waited, and for whom.
        """
        if not self._holders or os.getpid() != self._pid:
            return
        wanted = None if indices is None else set(indices)
        since_s = time.perf_counter()
        with self._changed:
            try:
                while closed := [i for i in list(self._holders) if wanted is None or i in wanted]:
                    if not self._await_opening():
                        raise self.stuck(what, min(closed))
            finally:
                self._waited_s += time.perf_counter() - since_s

    def _await_opening(self) -> bool:
        """Whether a gate opens in time; the lock is held."""
        openings = self._openings
        return self._changed.wait_for(lambda: self._openings != openings, self.timeout_s)

    def stuck(self, what: str, index: int) -> PoolError:
        """What to raise where `what` has waited too long for a subgroup."""
        holders = ", ".join(self._holders.get(index, {}).values()) or "nobody"
        return PoolError(
            f"it waited {self.timeout_s:g} s for subgroup {index}, which is being captured for "
            f"{holders}, without any other one being captured meanwhile",
            where=what,
            fix="look for a stalled disk, or for a save that was neither finished nor abandoned",
        )

    def add_waited(self, waited_s: float) -> None:
        """Count seconds that a step was held back."""
        with self._changed:
            self._waited_s += waited_s

    @contextmanager
    def heard(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have `listener` called after every opening, on any thread."""
        with self._changed:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(listener)


class Hold(NamedTuple):
    """Memory of a subgroup that does not change while its gate is closed.

    `place` is "cpu" or the device as text, `begin` and `end` are addresses there, and `index` is
    the subgroup's.
    """

    place: str
    begin: int
    end: int
    index: int  # type: ignore[assignment]  # hides tuple.index, for which nobody asks


class HeldState:
    """State as it is at a step's end, live, and unchanged until it is released.

    Whoever captures it calls `ready` for each subgroup first, then `release` as soon as all of
    its holds that are wanted have been read, and `ready` for the whole at last. `abandon` releases
    the rest, as does the end of this object's life.

    Args:
        gates: of all subgroups; those of `holds` are closed here.
        holds: what is held.
        what: names the capture in messages.
        waits: each blocks until a part of what `ready` waits for is over, given what it was.
        unread: a context in which this thread takes state dicts of held weights without waiting,
            because it reads none of their values before `ready`.

    Attributes:
        tree: live tensors, pieces of tensors and objects, in nested dicts.
        holds: what is held, by address.
        gates: of all subgroups.
    """

    def __init__(
        self,
        gates: Gates,
        holds: list[Hold],
        what: str,
        waits: Iterable[Callable[[int | None], object]] = (),
        unread: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.tree: dict[str, Any] = {}
        self.holds, self.gates, self.unread = holds, gates, unread
        self._waits = tuple(waits)
        self._closing = gates.close({hold.index for hold in holds}, what)
        weakref.finalize(self, gates.open, self._closing).atexit = False

    @property
    def indices(self) -> list[int]:
        """The subgroups of `holds`."""
        return sorted({hold.index for hold in self.holds})

    def ready(self, index: int | None = None) -> None:
        """Block until memory holds what is to be captured: a step may still run on.

        To be called by a capturing thread, not by one that training waits for. Then all work
        on a device is over that this memory's content comes from.

        Args:
            index: of a subgroup; None: the whole, and then the step is over.

        Raises:
            Exception: what failed in that step; there is nothing to capture then.
        """
        for wait in self._waits:
            wait(index)
        if index is None:
            self._waits = ()  # and with them what the step holds

    def release(self, index: int) -> None:
        """A subgroup is captured: it may change. Idempotent."""
        self.gates.open(self._closing, index)

    def abandon(self) -> None:
        """All that is left may change. Idempotent."""
        self.gates.open(self._closing)
