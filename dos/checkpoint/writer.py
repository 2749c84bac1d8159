"""Writing a file: chunks through a bounded ring, hashed on their way, several in flight."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import xxhash

from dos.checkpoint.buffers import Slots, aligned_buffer, view_of
from dos.checkpoint.capture import Capture
from dos.checkpoint.format import BLOCK_BYTES, header_digest, index_bytes, sealed_header
from dos.checkpoint.layout import Layout
from dos.checkpoint.manifest import FileRecord
from dos.checkpoint.native import Piece, fill
from dos.checkpoint.sharing import share_out, threads_and_depth
from dos.checkpoint.storage import Queue, Storage
from dos.checkpoint.tuning import IoShape

_PART_BYTES = 32 << 20
_AT_ONCE = 4
"""Chunks that a thread fills without the GIL at most.

To get it back takes 5 ms and more wherever another thread computes in Python, and a fast disk
writes more than one chunk meanwhile; with more at once, the disk waits for the first.
"""


class FileWriter:
    """Writes one file of a checkpoint.

    Args:
        storage: the file system.
        path: of the file, which does not exist.
        layout: where everything lies.
        index_text: the JSON of the index.
        shape: of the requests.
        progress: called with the bytes of each chunk that is on its way.
        capture: tells the order of the chunks and waits for what they read; told of each once
            nothing is read of its sources any more.
        ring: memory for chunks that are not written where they lie; None: as much as is in flight
            at once.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        layout: Layout,
        index_text: bytes,
        shape: IoShape,
        *,
        progress: Callable[[int], None],
        capture: Capture,
        ring: memoryview | None = None,
    ) -> None:
        self._storage, self._path = storage, path
        self._layout, self._index_text = layout, index_text
        self._direct = shape.direct
        self._threads, self._depth = threads_and_depth(shape)
        self._progress, self._capture = progress, capture
        self._ring = ring
        self._digests = [b""] * layout.n_chunks
        self._ends = [run.end for run in layout.runs]
        self._lock = threading.Lock()

    def write(self) -> FileRecord:
        """Write all of it, durably.

        Raises:
            OSError: of the file system; the file is closed, and may be incomplete.
            Exception: what failed in the step whose state this is.
        """
        layout, storage = self._layout, self._storage
        file = storage.open(self._path, write=True, create=True, direct=self._direct)
        if max(file.memory_align_bytes, file.offset_align_bytes) > BLOCK_BYTES:
            storage.close(file)
            file = storage.open(self._path, write=True, direct=False)
        try:
            padded = -(-layout.file_bytes // BLOCK_BYTES) * BLOCK_BYTES
            storage.preallocate(file, padded)
            rings = self._rings()
            share_out(partial(self._write_some, file, rings), self._capture.order, len(rings))
            self._capture.await_all()
            index = index_bytes(self._index_text, self._digests)
            begin = layout.header_bytes + layout.chunked_bytes
            digest = xxhash.xxh3_128_hexdigest(index, seed=layout.file_id.seed(begin))
            header = sealed_header(layout.header, digest, layout.file_id)
            queue = storage.queue(depth=2)
            try:
                _write_range(queue, file, begin, index)
                _write_range(queue, file, 0, header)  # last: before it this is no file of ours
            finally:
                queue.close()
            self._advance(len(index) + len(header))
            if padded != layout.file_bytes:
                storage.truncate(file, layout.file_bytes)
            storage.fsync(file)
        finally:
            storage.close(file)
        sealed = header_digest(header, layout.file_id)
        assert sealed is not None
        return FileRecord(layout.file_id, layout.file_bytes, len(header), sealed)

    def _rings(self) -> list[memoryview]:
        """Memory of each thread; as many as there are threads that can have a slot."""
        slot_bytes = self._layout.chunk_bytes
        if self._ring is None:
            count = min(self._depth, self._layout.n_chunks) * slot_bytes
            return [aligned_buffer(count) for _ in range(self._threads)]
        slots = len(self._ring) // slot_bytes
        threads = min(self._threads, slots)
        each_bytes = slots // threads * slot_bytes
        begins = range(0, threads * each_bytes, each_bytes)
        return [self._ring[begin : begin + each_bytes] for begin in begins]

    def _write_some(self, file: Any, rings: list[memoryview], chunks: Iterator[int]) -> None:
        layout = self._layout
        with self._lock:
            slots = Slots(rings.pop(), layout.chunk_bytes)
        queue = self._storage.queue(depth=self._depth, registered=slots.views)
        flying: dict[int, int | None] = {}  # slot by chunk
        filled: deque[tuple[int, int | None, memoryview]] = deque()

        def land(*, wait: bool) -> None:
            for chunk, error in queue.completed(wait=wait):
                slot = flying.pop(chunk)
                if error is not None:
                    raise error
                if slot is None:
                    self._capture.took(chunk)
                else:
                    slots.free.append(slot)
            while filled and len(flying) < self._depth:
                chunk, slot, view = filled.popleft()
                flying[chunk] = slot
                queue.write(file, layout.header_bytes + layout.span(chunk)[0], view, chunk)
                self._advance(len(view))

        def room() -> int:
            # What is filled runs ahead of the disk as far as the ring reaches.
            return min(_AT_ONCE, len(slots.free), len(slots.views) - len(filled))

        try:
            for first in chunks:
                while not room():
                    land(wait=True)
                batch = [first, *islice(chunks, room() - 1)]
                for chunk in batch:
                    self._capture.await_parts(chunk)
                ready = [self._prepare(chunk, slots, file.memory_align_bytes) for chunk in batch]
                digests = fill([(view, pieces, seed) for _, view, pieces, seed in ready])
                for chunk, (slot, view, _, _), digest in zip(batch, ready, digests, strict=True):
                    self._digests[chunk] = digest
                    filled.append((chunk, slot, view))
                    land(wait=False)  # a failure ends it here, before all is captured
                    if slot is not None:
                        self._capture.took(chunk)
            while filled or flying:
                land(wait=True)
        finally:
            queue.close()

    def _advance(self, n_bytes: int) -> None:
        with self._lock:
            self._progress(n_bytes)

    def _prepare(
        self, chunk: int, slots: Slots, memory_align_bytes: int
    ) -> tuple[int | None, memoryview, list[Piece], int]:
        """Where a chunk is written from, the pieces to fill it with, and its checksum's seed.

        None for a slot: it is written from where it lies.
        """
        begin, end = self._layout.span(chunk)
        seed = self._layout.file_id.seed(self._layout.header_bytes + begin)
        runs, number = self._layout.runs, bisect_right(self._ends, begin)
        if number < len(runs) and runs[number].begin <= begin and runs[number].end >= end:
            run = runs[number]
            address = run.source.address + begin - run.begin
            if run.source.address and address % memory_align_bytes == 0:
                return None, view_of(address, end - begin), [(0, address, end - begin)], seed
        slot = slots.free.pop()
        pieces = list(self._pieces(number, begin, end, slots.addresses[slot]))
        return slot, slots.view(slot, end - begin), pieces, seed

    def _pieces(self, number: int, begin: int, end: int, address: int) -> Iterator[Piece]:
        """The runs of a chunk from the one with this number on; zeros belong between them.

        What does not lie in memory as it is written is brought to the chunk's address now.
        """
        runs = self._layout.runs
        while number < len(runs) and runs[number].begin < end:
            run = runs[number]
            number += 1
            low, high = max(run.begin, begin), min(run.end, end)
            at = run.source.address + low - run.begin
            if not run.source.address:
                at = address + low - begin
                run.source.fill(low - run.begin, high - run.begin, at)
            yield low - begin, at, high - low


def _write_range(queue: Queue, file: Any, offset: int, data: bytes) -> None:
    """Write bytes from a block's start on, with zeros up to the next block."""
    buffer = aligned_buffer(-(-len(data) // BLOCK_BYTES) * BLOCK_BYTES)
    buffer[: len(data)] = data
    for number, begin in enumerate(range(0, len(buffer), _PART_BYTES)):
        queue.write(file, offset + begin, buffer[begin : begin + _PART_BYTES], number)
    for _, error in queue.drain():
        if error is not None:
            raise error
