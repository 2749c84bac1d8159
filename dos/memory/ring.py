"""The ring: memory for staging, passed from user to user with back-pressure."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from dos.errors import PoolError
from dos.memory.extents import FreeExtents
from dos.memory.fence import WAIT_S
from dos.memory.lease import RingLease
from dos.memory.pinned import Slab
from dos.memory.sizes import PAGE_BYTES, bytes_text, padded_bytes

_NAMED_HOLDERS = 8


@dataclass(eq=False)  # by identity: two waiters may want the same for the same
class _Waiter:
    n_bytes: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({bytes_text(self.n_bytes)})"


@dataclass(frozen=True)
class _Holding:
    start_bytes: int
    size_bytes: int
    what: str


class Ring:
    """Leases from a region that never grows. Any thread may acquire and release.

    A request waits while there is no room. Waiters are served in the order they came, so that a
    stream of small requests cannot starve a large one; releases come in any order.

    Args:
        slab: the memory.
        offset_bytes: where in it the region begins, a multiple of 4 KiB.
        capacity_bytes: size of the region, a multiple of 4 KiB; 0 for none.
    """

    def __init__(self, slab: Slab, offset_bytes: int, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._slab = slab
        self._offset_bytes = offset_bytes
        self._changed = threading.Condition()
        self._free = FreeExtents(capacity_bytes)
        self._held: dict[int, _Holding] = {}  # by the serial number of the lease
        self._serials = itertools.count()
        self._waiting: deque[_Waiter] = deque()
        self._closed = False
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes held now."""
        with self._changed:
            return self.capacity_bytes - self._free.total_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held at once."""
        return self._peak_bytes

    def acquire(self, n_bytes: int, what: str, timeout_s: float = WAIT_S) -> RingLease:
        """``n_bytes`` in one piece, aligned to 4 KiB; waits its turn and for room.

        Hold nothing that a waiter before you needs: see `acquire_pieces` for large amounts.

        Raises:
            PoolError: larger than the ring; no room within ``timeout_s`` seconds (names the
                holders); the pool is or gets closed; or this is a forked child.
        """
        self._slab.check_process()  # before the lock, which a child may inherit locked
        size_bytes = max(padded_bytes(n_bytes), PAGE_BYTES)
        if size_bytes > self.capacity_bytes:
            raise PoolError(
                f"{what} asked for {bytes_text(n_bytes)} in one piece, more than the whole "
                f"ring of {bytes_text(self.capacity_bytes)}",
                where="ring",
                fix="take it in parts with ring.acquire_pieces(n_bytes, what), or raise ring_bytes",
            )
        waiter = _Waiter(n_bytes, what)
        with self._changed:
            self._waiting.append(waiter)
            try:
                self._wait_for_room(waiter, size_bytes, timeout_s)
                return self._take(n_bytes, size_bytes, what)
            finally:
                self._waiting.remove(waiter)
                self._changed.notify_all()

    def acquire_pieces(
        self,
        n_bytes: int,
        what: str,
        *,
        largest_bytes: int | None = None,
        timeout_s: float = WAIT_S,
    ) -> Iterator[RingLease]:
        """Leases of ``n_bytes`` in all, one after another.

        Whoever takes the pieces releases each of them, before asking for the next or from the
        thread that finishes with it. The iterator itself holds none while it waits, so that two
        of them cannot block each other.

        Args:
            n_bytes: the whole amount; 0 gives no lease.
            what: name of the holder.
            largest_bytes: bound of a piece, rounded up to 4 KiB and no more than the ring;
                None: half of the ring, so that one piece is filled while the last one drains.
            timeout_s: bound of the wait for each piece.

        Raises:
            PoolError: as `acquire`.
        """
        if largest_bytes is None:
            largest_bytes = self.capacity_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        largest_bytes = max(min(padded_bytes(largest_bytes), self.capacity_bytes), PAGE_BYTES)
        for start in range(0, n_bytes, largest_bytes):
            yield self.acquire(min(largest_bytes, n_bytes - start), what, timeout_s)

    def close(self) -> None:
        """Refuse further requests and wake all waiters with that refusal. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for_room(self, waiter: _Waiter, size_bytes: int, timeout_s: float) -> None:
        def my_turn() -> bool:
            first = self._waiting[0] is waiter
            return self._closed or (first and self._free.largest_bytes >= size_bytes)

        in_time = self._changed.wait_for(my_turn, timeout_s)
        if self._closed:
            raise PoolError(
                f"the pool was closed; {waiter} cannot be had",
                where="ring",
                fix="wait for saves and steps to finish before close()",
            )
        if not in_time:
            raise PoolError(
                f"{waiter} waited {timeout_s:g} s; {self._occupancy(waiter)}",
                where="ring",
                fix="raise ring_bytes, or look for what keeps its holders from releasing",
            )

    def _take(self, n_bytes: int, size_bytes: int, what: str) -> RingLease:
        start_bytes, serial = self._free.take(size_bytes), next(self._serials)
        self._held[serial] = _Holding(start_bytes, size_bytes, what)
        used_bytes = self.capacity_bytes - self._free.total_bytes
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        return RingLease(
            partial(self._give_back, serial),
            self._slab,
            self._offset_bytes + start_bytes,
            n_bytes,
            what,
        )

    def _give_back(self, serial: int) -> None:
        """Free the lease of this number; its `release` calls this. Idempotent."""
        with self._changed:
            holding = self._held.pop(serial, None)
            if holding is not None:
                self._free.give_back(holding.start_bytes, holding.size_bytes)
                self._changed.notify_all()

    def _occupancy(self, waiter: _Waiter) -> str:
        """What is free, who holds the rest, and who was before ``waiter``."""
        held: Counter[str] = Counter()
        for holding in self._held.values():
            held[holding.what] += holding.size_bytes
        holders = [f"{what} ({bytes_text(size)})" for what, size in held.most_common()]
        if len(holders) > _NAMED_HOLDERS:
            holders[_NAMED_HOLDERS:] = [f"{len(holders) - _NAMED_HOLDERS} more"]
        text = (
            f"{bytes_text(self._free.total_bytes)} of {bytes_text(self.capacity_bytes)} are "
            f"free, {bytes_text(self._free.largest_bytes)} in one piece; held by "
            f"{', '.join(holders) or 'nobody'}"
        )
        first = self._waiting[0]
        return text if first is waiter else f"{text}; first in the queue: {first}"
