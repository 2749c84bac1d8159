"""A checkpoint opened for reading: all its files are checked but for their data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dos.checkpoint.buffers import aligned_buffer
from dos.checkpoint.format import (
    BLOCK_BYTES,
    INDEX,
    Header,
    Index,
    header_digest,
    parse_header,
    parse_index,
)
from dos.checkpoint.manifest import MANIFEST, FileRecord, parse_manifest
from dos.checkpoint.storage import Completion, Queue, Storage
from dos.checkpoint.tuning import IoShape, shape_for
from dos.errors import DOSError, FormatError, IntegrityError

_PART_BYTES = 32 << 20
_ATTEMPTS = 100
"""To open a checkpoint that is replaced again and again."""


@dataclass(frozen=True)
class OpenedFile:
    """A file of a checkpoint, its header and index checked.

    Attributes:
        file: of the storage.
        header: what its header tells.
        index: what its index tells.
        shape: of the requests that read it.
    """

    file: Any
    header: Header
    index: Index
    shape: IoShape

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return self.header.file_id.name

    @property
    def n_chunks(self) -> int:
        """How many chunks its data have."""
        return -(-self.header.chunked_bytes // self.header.chunk_bytes)

    def span(self, chunk: int) -> tuple[int, int]:
        """Which bytes of the data a chunk is."""
        begin = chunk * self.header.chunk_bytes
        return begin, min(begin + self.header.chunk_bytes, self.header.chunked_bytes)

    def digest(self, chunk: int) -> bytes:
        """The checksum of a chunk."""
        return self.index.digests[16 * chunk : 16 * chunk + 16]

    def seed(self, chunk: int) -> int:
        """What that checksum is seeded with."""
        offset = self.header.data_begin + chunk * self.header.chunk_bytes
        return self.header.file_id.seed(offset)

    def names_within(self, begin: int, end: int) -> list[str]:
        """Entries with bytes in this part of the data."""
        entries = self.header.entries.items()
        return [name for name, entry in entries if entry.begin < end and entry.end > begin]


class Opened:
    """A checkpoint's files, opened and checked; use it in `with`.

    Args:
        path: of the checkpoint's directory.
        storage: the file system.

    Attributes:
        files: in the order of ranks.

    Raises:
        FormatError: there is no checkpoint, or one of a form that is not read.
        IntegrityError: a manifest, header or index is damaged, or a file has another size.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path, self.storage = path, storage
        self._shape = shape_for(path)
        self.files: list[OpenedFile] = []
        text = self._manifest()
        for _ in range(_ATTEMPTS):
            try:
                self._open_all(text)
                return
            except DOSError as error:
                # A file of another checkpoint is no damage where a save took its place meanwhile.
                before, text = text, self._manifest()
                if text == before:
                    raise
                failed = error
        raise failed

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for opened in self.files:
            self.storage.close(opened.file)
        self.files = []

    def _manifest(self) -> bytes:
        try:
            return self.storage.read_bytes(os.path.join(self.path, MANIFEST))
        except OSError as error:
            raise FormatError(
                f"no checkpoint: its manifest cannot be read: {error.strerror}",
                where=self.path,
                fix="give the directory that `save` was given; one without manifest is unfinished",
            ) from error

    def _open_all(self, manifest: bytes) -> None:
        records = parse_manifest(manifest, os.path.join(self.path, MANIFEST))
        self.checkpoint_id = records[0].file_id.checkpoint_id
        queue = self.storage.queue(depth=2)
        try:
            for record in records:
                self.files.append(self._open(record, queue))
        except BaseException:
            self.close()
            raise
        finally:
            queue.close()

    def _open(self, record: FileRecord, queue: Queue) -> OpenedFile:
        name = record.file_id.name
        file, header = open_checked(self.storage, self.path, record, self._shape, queue)
        try:
            begin = header.data_begin + header.chunked_bytes
            data = read_range(queue, file, begin, record.file_bytes - begin, name)
            return OpenedFile(file, header, parse_index(data, header), self._shape)
        except BaseException:
            self.storage.close(file)
            raise


def open_checked(
    storage: Storage, directory: str, record: FileRecord, shape: IoShape, queue: Queue
) -> tuple[Any, Header]:
    """A file that is as the manifest says, and its header.

    Raises:
        FormatError: a header of a form that is not read.
        IntegrityError: it cannot be read, has another size, or its header is damaged.
    """
    name = record.file_id.name
    path = os.path.join(directory, name)
    try:
        n_bytes = storage.size(path)
        if n_bytes != record.file_bytes:
            what = "truncated" if n_bytes < record.file_bytes else "longer than it was"
            raise IntegrityError(
                f"the file is {what}: {n_bytes} bytes instead of {record.file_bytes}",
                where=name,
            )
        file = storage.open(path, write=False, direct=shape.direct)
        if max(file.offset_align_bytes, file.memory_align_bytes) > BLOCK_BYTES:
            storage.close(file)
            file = storage.open(path, write=False, direct=False)
    except OSError as error:
        raise IntegrityError(f"the file cannot be opened: {error.strerror}", where=name) from error
    try:
        return file, _header(file, record, queue)
    except BaseException:
        storage.close(file)
        raise


def _header(file: Any, record: FileRecord, queue: Queue) -> Header:
    name = record.file_id.name
    text = read_range(queue, file, 0, record.header_bytes, name)
    if header_digest(text, record.file_id) != record.header_digest:
        raise IntegrityError(
            f"the header, {len(text)} bytes from offset 0, is damaged or of another file",
            where=name,
        )
    header = parse_header(text, record.file_id, record.file_bytes)
    ordered = list(header.entries)
    if header.chunked_bytes % BLOCK_BYTES or ordered[-1] != INDEX:
        raise FormatError("the index does not begin at a block behind all else", where=name)
    return header


def read_range(queue: Queue, file: Any, offset: int, n_bytes: int, name: str) -> bytes:
    """Bytes from a block's start on. IntegrityError if they cannot be read."""
    try:
        buffer = aligned_buffer(-(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    except (OSError, OverflowError) as error:
        raise IntegrityError(f"no memory for {n_bytes:,} bytes of it", where=name) from error
    for number, begin in enumerate(range(0, len(buffer), _PART_BYTES)):
        queue.read(file, offset + begin, buffer[begin : begin + _PART_BYTES], number)
    check_read(queue.drain(), name)
    return bytes(buffer[:n_bytes])


def check_read(completions: Sequence[Completion], name: str) -> None:
    """IntegrityError for a read that failed."""
    for _, error in completions:
        if error is not None:
            raise IntegrityError(f"cannot be read: {error.strerror}", where=name) from error
