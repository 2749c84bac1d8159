"""Reading chunks of a file: several in flight, each checked, each to where it belongs."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from dos.checkpoint.buffers import Arena, Slots, aligned_buffer, view_of
from dos.checkpoint.native import scatter
from dos.checkpoint.opened import OpenedFile
from dos.checkpoint.paths import RESERVED
from dos.checkpoint.sharing import share_out, threads_and_depth
from dos.checkpoint.storage import Storage
from dos.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes of a file's data that are wanted at an address of host memory."""

    begin: int
    end: int
    address: int


@dataclass
class Wanted:
    """What is wanted of a file.

    Attributes:
        opened: the file.
        fresh: bytes of the data that stay in memory of their own, laid out as in the file.
        targets: bytes that are wanted in memory that there is already.
        arenas: the fresh memory, each with its first chunk and the one behind its last.
    """

    opened: OpenedFile
    fresh: list[tuple[int, int]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    arenas: list[tuple[int, int, Arena]] = field(default_factory=list)

    @property
    def chunks(self) -> Sequence[int]:
        """Numbers of the chunks that hold any of it, ascending."""
        ranges = [*self.fresh, *((target.begin, target.end) for target in self.targets)]
        return _chunks_of(ranges, self.opened.header.chunk_bytes)

    @property
    def n_bytes(self) -> int:
        """What has to be read for it."""
        return sum(end - begin for begin, end in map(self.opened.span, self.chunks))

    def allocate(self) -> None:
        """Make the fresh memory: one arena for all chunks that follow each other."""
        chunk_bytes, limit = self.opened.header.chunk_bytes, self.opened.header.chunked_bytes
        for first, last in _merged(_chunks_of(self.fresh, chunk_bytes)):
            begin, end = first * chunk_bytes, min(last * chunk_bytes, limit)
            self.arenas.append((first, last, Arena(end - begin)))

    def arena_of(self, chunk: int) -> tuple[Arena, int] | None:
        """The arena that a chunk belongs to, and where in it the chunk begins."""
        number = bisect_right(self.arenas, chunk, key=lambda one: one[0]) - 1
        if number < 0 or chunk >= self.arenas[number][1]:
            return None
        first, _, arena = self.arenas[number]
        return arena, (chunk - first) * self.opened.header.chunk_bytes

    def close(self) -> None:
        """Give back fresh memory that nobody keeps."""
        for _, _, arena in self.arenas:
            arena.close()


class ChunkReader:
    """Reads what is wanted of one file.

    Args:
        storage: the file system.
        wanted: what, and where to.
        verify: compare checksums.
        progress: called with the bytes of each chunk that is done.
        on_damage: called for each damaged chunk; None: the first one is raised.
    """

    def __init__(
        self,
        storage: Storage,
        wanted: Wanted,
        *,
        verify: bool,
        progress: Callable[[int], None] | None = None,
        on_damage: Callable[[IntegrityError], None] | None = None,
    ) -> None:
        self._storage, self._wanted, self._verify = storage, wanted, verify
        self._progress, self._on_damage = progress, on_damage
        self._opened = wanted.opened
        self._threads, self._depth = threads_and_depth(wanted.opened.shape)
        self._chunk_bytes = wanted.opened.header.chunk_bytes
        self._targets = sorted(wanted.targets, key=lambda target: target.begin)
        self._begins = [target.begin for target in self._targets]
        # Of all targets up to each: where the furthest ends. They may overlap.
        self._ends: list[int] = []
        for target in self._targets:
            self._ends.append(max(target.end, self._ends[-1] if self._ends else 0))
        self._lock = threading.Lock()

    def read(self) -> None:
        """Read all that is wanted.

        Raises:
            IntegrityError: a chunk is damaged or cannot be read; some memory is written already.
        """
        share_out(partial(self._read_some, scratch=False), self._wanted.chunks, self._threads)

    def check(self) -> None:
        """Read and compare all of the file, and write to no memory of the caller's."""
        share_out(
            partial(self._read_some, scratch=True), range(self._opened.n_chunks), self._threads
        )

    def check_wanted(self) -> None:
        """Read and compare what is wanted, and write to no memory of the caller's."""
        share_out(partial(self._read_some, scratch=True), self._wanted.chunks, self._threads)

    def _read_some(self, chunks: Iterator[int], *, scratch: bool) -> None:
        # Nothing registered: fresh memory is used once, and preparing it costs more than it saves.
        queue = self._storage.queue(depth=self._depth)
        slots: Slots | None = None
        flying: dict[int, tuple[memoryview, int | None, bool]] = {}

        def land(*, wait: bool) -> None:
            for chunk, error in queue.completed(wait=wait):
                view, slot, copy = flying.pop(chunk)
                self._land(chunk, view, error, copy=copy)
                if slots is not None and slot is not None:
                    slots.free.append(slot)

        try:
            for chunk in chunks:
                while len(flying) >= self._depth:
                    land(wait=True)
                begin, end = self._opened.span(chunk)
                slot, copy = None, not scratch
                view = None if scratch else self._fresh(chunk, end - begin)
                if view is None and not scratch:
                    view = self._in_place(begin, end)
                    copy = view is None
                if view is None:
                    if slots is None:
                        n_bytes = self._depth * self._chunk_bytes
                        slots = Slots(aligned_buffer(n_bytes), self._chunk_bytes)
                    slot = slots.free.pop()
                    view = slots.view(slot, end - begin)
                flying[chunk] = view, slot, copy
                queue.read(self._opened.file, self._opened.header.data_begin + begin, view, chunk)
                land(wait=False)
            while flying:
                land(wait=True)
        finally:
            queue.close()  # before the memory can go

    def _fresh(self, chunk: int, n_bytes: int) -> memoryview | None:
        """The fresh memory of a chunk, if it has any."""
        found = self._wanted.arena_of(chunk)
        return None if found is None else view_of(found[0].address + found[1], n_bytes)

    def _in_place(self, begin: int, end: int) -> memoryview | None:
        """The only memory that these bytes are wanted at, if the disk can write there."""
        targets = self._targets_of(begin, end)
        if len(targets) != 1 or targets[0].begin > begin or targets[0].end < end:
            return None
        address = targets[0].address + begin - targets[0].begin
        if address % self._opened.file.memory_align_bytes:
            return None
        return view_of(address, end - begin)

    def _targets_of(self, begin: int, end: int) -> list[Target]:
        last = bisect_left(self._begins, end)
        first = bisect_right(self._ends, begin)
        return [target for target in self._targets[first:last] if target.end > begin]

    def _land(self, chunk: int, view: memoryview, error: OSError | None, *, copy: bool) -> None:
        begin, end = self._opened.span(chunk)
        damage = self._damage(chunk, view, error)
        if damage is not None:
            if self._on_damage is None:
                raise damage
            with self._lock:
                self._on_damage(damage)
        if copy:
            for target in self._targets_of(begin, end):
                # One by one, because targets may overlap.
                low, high = max(begin, target.begin), min(end, target.end)
                at = target.address + low - target.begin
                scatter(view, [(low - begin, at, high - low)])
        if self._progress is not None:
            with self._lock:
                self._progress(end - begin)

    def _damage(self, chunk: int, view: memoryview, error: OSError | None) -> IntegrityError | None:
        opened = self._opened
        if error is None:
            if not self._verify:
                return None
            if xxhash.xxh3_128_digest(view, seed=opened.seed(chunk)) == opened.digest(chunk):
                return None
        what = "damaged" if error is None else f"cannot be read ({error.strerror})"
        damage = IntegrityError(
            f"{what}: {self._told(*opened.span(chunk))}",
            where=opened.name,
            fix="load another checkpoint, or the undamaged part of this with `only`",
        )
        damage.__cause__ = error
        return damage

    def _told(self, begin: int, end: int) -> str:
        names = self._opened.names_within(begin, end)
        tensors = [name for name in names if not name.startswith(RESERVED)] or names
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        offset = self._opened.header.data_begin + begin
        return (
            f"the {end - begin} bytes from offset {offset} on, "
            f"which hold {', '.join(map(repr, tensors[:3]))}{more}"
        )


def _chunks_of(ranges: Iterable[tuple[int, int]], chunk_bytes: int) -> Sequence[int]:
    """Numbers of the chunks with bytes in any of the ranges, ascending."""
    found: set[int] = set()
    for begin, end in ranges:
        found.update(range(begin // chunk_bytes, -(-end // chunk_bytes)))
    return sorted(found)


def _merged(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of numbers that follow each other, as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1] = runs[-1][0], chunk + 1
        else:
            runs.append((chunk, chunk + 1))
    return runs
