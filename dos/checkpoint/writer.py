"""Writing a file: chunks through a bounded ring, hashed on their way, several in flight."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import xxhash

from dos.checkpoint.buffers import Slots, aligned_buffer, view_of
from dos.checkpoint.format import BLOCK_BYTES, header_digest, index_bytes, sealed_header
from dos.checkpoint.layout import Layout
from dos.checkpoint.manifest import FileRecord
from dos.checkpoint.native import Piece, gather
from dos.checkpoint.sharing import share_out, threads_and_depth
from dos.checkpoint.sources import Source
from dos.checkpoint.storage import Queue, Storage
from dos.checkpoint.tuning import IoShape

_PART_BYTES = 32 << 20


class FileWriter:
    """Writes one file of a checkpoint.

    Args:
        storage: the file system.
        path: of the file, which does not exist.
        layout: where everything lies.
        index_text: the JSON of the index.
        shape: of the requests.
        progress: called with the bytes of each chunk that is on its way.
        captured: called with each chunk, once nothing is read of its sources any more.
        order: the chunks, in the order in which they are taken.
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
        captured: Callable[[int], None],
        order: Sequence[int] | None = None,
        ring: memoryview | None = None,
    ) -> None:
        self._storage, self._path = storage, path
        self._layout, self._index_text = layout, index_text
        self._direct = shape.direct
        self._threads, self._depth = threads_and_depth(shape)
        self._progress, self._captured = progress, captured
        self._order = range(layout.n_chunks) if order is None else order
        self._ring = ring
        self._digests = [b""] * layout.n_chunks
        self._ends = [run.end for run in layout.runs]
        self._lock = threading.Lock()

    def write(self) -> FileRecord:
        """Write all of it, durably.

        Raises:
            OSError: of the file system; the file is closed, and may be incomplete.
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
            share_out(partial(self._write_some, file, rings), self._order, len(rings))
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
                    self._captured(chunk)
                else:
                    slots.free.append(slot)
            while filled and len(flying) < self._depth:
                chunk, slot, view = filled.popleft()
                flying[chunk] = slot
                queue.write(file, layout.header_bytes + layout.span(chunk)[0], view, chunk)
                self._advance(len(view))

        try:
            for chunk in chunks:
                begin, end = layout.span(chunk)
                run = bisect_right(self._ends, begin)
                view = self._in_place(run, begin, end, file.memory_align_bytes)
                # What is copied runs ahead of the disk as far as the ring reaches.
                while filled if view is not None else not slots.free:
                    land(wait=True)
                slot = None
                if view is None:
                    slot = slots.free.pop()
                    view = slots.view(slot, end - begin)
                    self._bring(run, begin, view, slots.addresses[slot])
                    self._captured(chunk)
                offset = layout.header_bytes + begin
                self._digests[chunk] = xxhash.xxh3_128_digest(
                    view, seed=layout.file_id.seed(offset)
                )
                filled.append((chunk, slot, view))
                land(wait=False)
            while filled or flying:
                land(wait=True)
        finally:
            queue.close()

    def _advance(self, n_bytes: int) -> None:
        with self._lock:
            self._progress(n_bytes)

    def _in_place(
        self, number: int, begin: int, end: int, memory_align_bytes: int
    ) -> memoryview | None:
        """The memory that a chunk lies in, if all of it does and the disk can take it so."""
        runs = self._layout.runs
        if number == len(runs):
            return None
        run = runs[number]
        address = run.source.address + begin - run.begin
        if not run.source.address or run.begin > begin or run.end < end:
            return None
        return view_of(address, end - begin) if address % memory_align_bytes == 0 else None

    def _bring(self, number: int, begin: int, view: memoryview, address: int) -> None:
        """Bring a chunk's bytes together in a slot, zeros between the runs."""
        end = begin + len(view)
        in_memory: list[Piece] = []
        elsewhere: list[tuple[Source, int, int, int]] = []
        runs = self._layout.runs
        while number < len(runs) and runs[number].begin < end:
            run = runs[number]
            number += 1
            low, high = max(run.begin, begin), min(run.end, end)
            source = run.source
            if source.address:
                in_memory.append((low - begin, source.address + low - run.begin, high - low))
            else:
                elsewhere.append((source, low - run.begin, high - run.begin, low - begin))
        gather(view, in_memory)
        for source, low, high, offset in elsewhere:
            source.fill(low, high, address + offset)


def _write_range(queue: Queue, file: Any, offset: int, data: bytes) -> None:
    """Write bytes from a block's start on, with zeros up to the next block."""
    buffer = aligned_buffer(-(-len(data) // BLOCK_BYTES) * BLOCK_BYTES)
    buffer[: len(data)] = data
    for number, begin in enumerate(range(0, len(buffer), _PART_BYTES)):
        queue.write(file, offset + begin, buffer[begin : begin + _PART_BYTES], number)
    for _, error in queue.drain():
        if error is not None:
            raise error
