"""Where everything lies in a file, fixed before the first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
from dos.checkpoint.sources import Source, memory_of_bytes
from dos.errors import FormatError

LARGE_BYTES = 1 << 20
"""Extents from this size on begin at a block."""
_PACK_BYTES = 4 << 20
"""Small ones are packed without gaps up to about this size: what is loaded as one piece."""


class Run(NamedTuple):
    """Bytes of the data that come from one source."""

    begin: int
    end: int
    source: Source


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
        entry = Entry(dtype, shape, self._end, self._end + n_bytes)
        self.entries[name] = entry
        self._end = entry.end
        return entry

    def add_run(self, extent: Extent) -> None:
        """Place an extent behind the last entry."""
        name, dtype, shape, n_bytes, _, source = extent
        _, _, begin, end = self.add(name, dtype, shape, n_bytes)
        if n_bytes:
            self.runs.append(Run(begin, end, source))

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
) -> Layout:
    """Fix all offsets of a file.

    Large extents in the tree's order, each from a block on; the others packed, sorted by their
    alignment so that each is aligned to its elements; objects; the index.

    Raises:
        FormatError: the header would be too long.
    """
    layout = Layout(file_id, chunk_bytes)
    small = []
    for extent in extents:
        if extent.n_bytes < LARGE_BYTES:
            small.append(extent)
            continue
        layout.align(BLOCK_BYTES)
        layout.add_run(extent)
    packed = _PACK_BYTES
    small.sort(key=_alignment, reverse=True)
    for extent in small:
        if packed >= _PACK_BYTES:
            layout.align(BLOCK_BYTES)
            packed = 0
        layout.align(_alignment(extent))  # only the union of views may be of an odd size
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


def _alignment(extent: Extent) -> int:
    """The largest power of two that divides the size of an element."""
    return extent.item_bytes & -extent.item_bytes or 1  # numpy has elements of no size
