"""Where everything lies in a file, fixed before the first byte is written."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias

from dos.checkpoint.bulk import make_tuple
from dos.checkpoint.format import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    INDEX,
    OBJECTS,
    PADDING,
    Entry,
    FileId,
    header_draft,
    index_size,
)
from dos.checkpoint.providers import Extent
from dos.checkpoint.sources import Memory, Source, Span, memory_of_bytes
from dos.errors import FormatError

LARGE_BYTES = 1 << 20
"""Extents from this size on begin at a block."""
_PACK_BYTES = 4 << 20
"""Small ones are packed without gaps up to about this size: what is loaded as one piece."""


_n_bytes = attrgetter("n_bytes")

Flat: TypeAlias = list[Extent]
"""Extents that adjoin in host memory, in this order."""


class Run(NamedTuple):
    """Bytes of the data that come from one source, and the memory that it reads."""

    begin: int
    end: int
    source: Source
    span: Span | None


@dataclass
class Layout:
    """A file's entries and where their bytes come from.

    Attributes:
        file_id: which file it is.
        entries: by name, in the order of their bytes.
        runs: in that order; what lies between them is zero.
        chunk_bytes: what one checksum covers.
        header: the header but for its digests.
    """

    file_id: FileId
    chunk_bytes: int = CHUNK_BYTES
    entries: dict[str, Entry] = field(default_factory=dict, init=False)
    runs: list[Run] = field(default_factory=list, init=False)
    header: bytes = field(default=b"", init=False)
    _end: int = field(default=0, init=False)
    _pads: int = field(default=0, init=False)

    @property
    def header_bytes(self) -> int:
        """Offset of the data in the file."""
        return len(self.header)

    @property
    def chunked_bytes(self) -> int:
        """Data before the index."""
        return self.entries[INDEX].begin

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.header_bytes + self._end

    @property
    def n_chunks(self) -> int:
        """How many checksums there are."""
        return -(-self.chunked_bytes // self.chunk_bytes)

    def span(self, chunk: int) -> tuple[int, int]:
        """Which bytes of the data a chunk is."""
        begin = chunk * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.chunked_bytes)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], n_bytes: int) -> Entry:
        """Place an entry behind the last one."""
        if name in self.entries:
            raise FormatError(f"two tensors would be called {name!r}", where="state")
        begin, self._end = self._end, self._end + n_bytes
        entry = self.entries[name] = make_tuple(Entry, (dtype, shape, begin, self._end))
        return entry

    def add_run(self, extent: Extent) -> None:
        """Place an extent behind the last entry."""
        name, dtype, shape, n_bytes, _, source, span = extent
        _, _, begin, end = self.add(name, dtype, shape, n_bytes)
        if n_bytes:
            self.runs.append(make_tuple(Run, (begin, end, source, span)))

    def add_flat(self, flat: Flat) -> None:
        """Place extents that adjoin in memory as one run, which may be written where it lies."""
        spans = [self.add(*extent[:4]) for extent in flat]
        source = Memory(flat[0].source.address, [extent.source for extent in flat])
        span = Span("cpu", source.address, source.address + spans[-1].end - spans[0].begin)
        self.runs.append(Run(spans[0].begin, spans[-1].end, source, span))

    def align(self, n_bytes: int) -> None:
        """Go on at a multiple; the gap has a name too, because safetensors wants it so."""
        gap = -self._end % n_bytes
        if gap:
            self.add(f"{PADDING}{self._pads}", "U8", (gap,), gap)
            self._pads += 1


def lay_out(
    file_id: FileId,
    extents: Sequence[Extent],
    objects: bytes | bytearray,
    index_text: bytes,
    chunk_bytes: int = CHUNK_BYTES,
    leases: Sequence[tuple[int, int]] = (),
) -> Layout:
    """Fix all offsets of a file.

    Large extents in the tree's order, each from a block on, and so what adjoins in a lease; the
    others packed, sorted by their alignment so that each is aligned to its elements; objects; the
    index.

    Args:
        file_id: which file it is.
        extents: of tensors and arrays.
        objects: bytes of objects.
        index_text: the JSON of the index.
        chunk_bytes: what one checksum covers.
        leases: host memory, by its first address and the one behind it, of which the extents
            that adjoin stay together, in its order.

    Raises:
        FormatError: the header would be too long.
    """
    layout = Layout(file_id, chunk_bytes)
    small: dict[int, list[Extent]] = defaultdict(list)
    for flat in _flats(extents, leases):
        if sum(map(_n_bytes, flat)) < LARGE_BYTES:
            for extent in flat:
                small[_alignment(extent.item_bytes)].append(extent)
            continue
        layout.align(BLOCK_BYTES)
        if len(flat) > 1:
            layout.add_flat(flat)
        else:
            layout.add_run(flat[0])
    packed = _PACK_BYTES
    for alignment in sorted(small, reverse=True):
        for extent in small[alignment]:
            if packed >= _PACK_BYTES:
                layout.align(BLOCK_BYTES)
                packed = 0
            layout.align(alignment)  # only the union of views may be of an odd size
            layout.add_run(extent)
            packed += extent.n_bytes
    if objects:
        layout.add_run(
            Extent(OBJECTS, "U8", (len(objects),), len(objects), 1, memory_of_bytes(objects))
        )
    layout.align(BLOCK_BYTES)
    n_chunks = -(-layout._end // chunk_bytes)
    n_bytes = index_size(index_text, n_chunks)
    layout.add(INDEX, "U8", (n_bytes,), n_bytes)
    layout.header = header_draft(file_id, layout.entries, chunk_bytes)
    return layout


def _alignment(item_bytes: int) -> int:
    """The largest power of two that divides the size of an element."""
    return item_bytes & -item_bytes or 1  # numpy has elements of no size


def _flats(extents: Sequence[Extent], leases: Sequence[tuple[int, int]]) -> list[Flat]:
    """All extents in their order, but those that adjoin in a lease behind the first of them."""
    if not leases:
        return [[extent] for extent in extents]
    begins = [begin for begin, _ in leases]
    flats: list[Flat] = []
    inside: list[tuple[int, int, Extent]] = []  # address, position in `flats`
    for extent in extents:
        address = extent.source.address if extent.n_bytes else 0
        lease = bisect_right(begins, address) - 1
        if lease >= 0 and address + extent.n_bytes <= leases[lease][1]:
            inside.append((address, len(flats), extent))
        flats.append([extent])
    inside.sort(key=itemgetter(0))
    first = end = 0
    for address, number, extent in inside:
        flats[number] = []
        if address != end:
            first = number
        flats[first].append(extent)
        end = address + extent.n_bytes
    return [flat for flat in flats if flat]
