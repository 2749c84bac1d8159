"""Capture: which chunks of a file still have to be read from memory, and whom that holds back."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from dos.checkpoint.layout import LARGE_BYTES, Layout, Run
from dos.checkpoint.providers import Extent
from dos.checkpoint.sources import Span, memory_of_bytes
from dos.errors import CheckpointError
from dos.memory.sizes import PAGE_BYTES

_COPIED_BYTES = 4 << 20


class Hold(Protocol):
    """Bytes of some memory that keep their values while the gate that holds them is closed."""

    @property
    def place(self) -> str:
        """As of a `Span`."""

    @property
    def begin(self) -> int:
        """Address of the first byte."""

    @property
    def end(self) -> int:
        """Address behind the last byte."""

    @property
    def index(self) -> int:
        """Which part of its owner's state it belongs to."""


class Held(Protocol):
    """State that its owner leaves as it is, part by part until that is released."""

    @property
    def holds(self) -> Sequence[Hold]:
        """What is held; no two of them overlap."""

    def ready(self, index: int | None = None) -> None:
        """Wait until a part, or all of it, is what it will be; raises why it will not."""

    def release(self, index: int) -> None:
        """The part with this index may change."""

    def abandon(self) -> None:
        """All of it may change."""


class _Part(NamedTuple):
    """A part of a held state: its number among the states, and its index there."""

    state: int
    of_state: int


class Capture:
    """Of the chunks of a file: which are copied before others, and what each sets free.

    Thread safe.

    Args:
        layout: of the file.
        held: states that their owners hold; whatever else the file takes from memory is copied
            first. None: the caller changes nothing, so the order does not matter.
        captured: called once nothing is read from memory any more.

    Attributes:
        order: all chunks, those first that have to be copied at once (of these, those first that
            nobody holds a byte of), and then in the order of the parts that they set free.
    """

    def __init__(
        self, layout: Layout, held: Sequence[Held] | None, captured: Callable[[], None]
    ) -> None:
        self._held, self._captured = held or (), captured
        self._parts_of: dict[int, set[_Part]] = {}
        self._loose: set[int] = set()
        self.order: Sequence[int] = range(layout.n_chunks)
        if held is not None:
            self._look_up(layout)
        self._n_missing = layout.n_chunks
        self._count = Counter(part for parts in self._parts_of.values() for part in parts)
        self._lock = threading.Lock()
        self._frozen = threading.Event()
        self._abandoned = False
        if not self._loose:
            self._frozen.set()
        # What is held, and no part of the file.
        everything = {
            _Part(number, hold.index)
            for number, state in enumerate(self._held)
            for hold in state.holds
        }
        self._release(everything - self._count.keys())
        if not self._n_missing:
            captured()

    def _look_up(self, layout: Layout) -> None:
        """Which parts each chunk reads of, and what else."""
        holds = _Holds(self._held)
        for run in layout.runs:
            for chunk, span in _spans(layout, run):
                parts, covered = holds.of(span)
                self._parts_of.setdefault(chunk, set()).update(parts)
                if not covered:
                    self._loose.add(chunk)
        first, last = _Part(-1, 0), _Part(len(self._held), 0)

        def turn(chunk: int) -> tuple[bool, _Part]:
            loose = chunk in self._loose
            return not loose, min(self._parts_of.get(chunk, ()), default=first if loose else last)

        self.order = sorted(self.order, key=turn)

    def await_parts(self, chunk: int) -> None:
        """Wait until a chunk's memory holds what is to be saved; raises why it will not."""
        for part in self._parts_of.get(chunk, ()):
            self._held[part.state].ready(part.of_state)

    def await_all(self) -> None:
        """Wait until all that is held is what is to be saved; raises why it will not be."""
        for state in self._held:
            state.ready()

    def took(self, chunk: int) -> None:
        """A chunk is read from memory, and will not be again.

        Raises:
            CheckpointError: it was abandoned: what was read may be of several steps.
        """
        with self._lock:
            if self._abandoned:
                raise CheckpointError(
                    "it was given up before all of it was captured", fix="save again"
                )
            parts = self._parts_of.pop(chunk, set())
            self._count.subtract(parts)
            done = [part for part in parts if not self._count[part]]
            self._loose.discard(chunk)
            self._n_missing -= 1
            frozen, captured = not self._loose, not self._n_missing
        self._release(done)
        if frozen:
            self._frozen.set()
        if captured:
            self._captured()

    def wait_frozen(self, timeout_s: float) -> bool:
        """Until all that nobody holds is copied, or the save failed; whether that was in time."""
        return self._frozen.wait(timeout_s)

    def abandon(self) -> None:
        """All may change from now on, so that what is still read is not saved."""
        with self._lock:
            self._abandoned = True
        for state in self._held:
            state.abandon()
        self._frozen.set()

    def _release(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            self._held[part.state].release(part.of_state)


class _Holds:
    """Looks up who holds a range of memory."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._by_place: dict[str, list[tuple[int, int, _Part]]] = {}
        for number, state in enumerate(held):
            for hold in state.holds:
                entry = (hold.begin, hold.end, _Part(number, hold.index))
                self._by_place.setdefault(hold.place, []).append(entry)
        for entries in self._by_place.values():
            entries.sort()

    def of(self, span: Span) -> tuple[set[_Part], bool]:
        """The parts that hold bytes of a range, and whether every byte of it is held."""
        entries = self._by_place.get(span.place, [])
        at = bisect_right(entries, span.begin, key=lambda entry: entry[0])
        parts, end = set(), span.begin
        for number in range(max(at - 1, 0), len(entries)):
            begin, stop, part = entries[number]
            if begin >= span.end:
                break
            if stop > span.begin:
                parts.add(part)
                end = max(end, stop) if begin <= end else end
        return parts, end >= span.end


def small_copied(extents: Sequence[Extent], held: Sequence[Held]) -> list[Extent]:
    """The extents, with copies of those that are small, in host memory, and held by nobody.

    Small ones share chunks with what is held. All of that would have to be ready, and be captured,
    before a save returns: for the sake of the states of generators, say.
    """
    holds, room_bytes, made = _Holds(held), _COPIED_BYTES, []
    for extent in extents:
        span, n_bytes = extent.span, extent.n_bytes
        small = 0 < n_bytes < LARGE_BYTES and n_bytes <= room_bytes
        if small and span is not None and span.place == "cpu" and not holds.of(span)[0]:
            copy = memory_of_bytes(bytearray(n_bytes))
            extent.source.fill(0, n_bytes, copy.address)
            extent = extent._replace(source=copy, span=None)
            room_bytes -= n_bytes
        made.append(extent)
    return made


def leases_of(held: Sequence[Held]) -> list[tuple[int, int]]:
    """Held host memory that begins at a page, with what adjoins it, by its two ends; sorted."""
    found: list[tuple[int, int]] = []
    holds = [hold for state in held for hold in state.holds if hold.place == "cpu"]
    for hold in sorted(holds, key=attrgetter("begin")):
        if found and found[-1][1] == hold.begin:
            found[-1] = found[-1][0], hold.end
        elif hold.begin % PAGE_BYTES == 0:
            found.append((hold.begin, hold.end))
    return found


def _spans(layout: Layout, run: Run) -> Iterator[tuple[int, Span]]:
    """The chunks that a run lies in, each with the memory that is read for it."""
    if run.span is None:
        return
    first, last = run.begin // layout.chunk_bytes, (run.end - 1) // layout.chunk_bytes
    for chunk in range(first, last + 1):
        span = run.span
        if run.source.address:  # as it lies, so that it is known which bytes
            begin, end = layout.span(chunk)
            offset = run.source.address - run.begin
            span = span._replace(
                begin=max(begin, run.begin) + offset, end=min(end, run.end) + offset
            )
        yield chunk, span
