"""A file system in memory that forgets at a power loss what nobody made durable.

It keeps two images. The volatile one is what the running system sees. The durable one is what
is sure to be on the disk. Between them lie the pending changes, in the order they were made;
at a power loss any of them may be on the disk, and any may not:

- a write or a change of size, until its file is synced: to the disk's own cache, also past the
  page cache; of a write any sectors;
- a change of names, until every directory that it touches is synced; a rename or an exchange
  all or nothing.

A name and what it names are apart: a renamed file may be there without its content.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.crash.image import ROOT_INODE, SECTOR_BYTES, Change, Image, Rename, Resize, Write

BLOCK_BYTES = 4096


@dataclass
class OpenFile:
    """See `dos.checkpoint.storage.File`."""

    path: str
    inode: int
    write: bool
    direct: bool
    in_flight: int = 0
    closed: bool = False

    @property
    def memory_align_bytes(self) -> int:
        return SECTOR_BYTES if self.direct else 1

    @property
    def offset_align_bytes(self) -> int:
        return BLOCK_BYTES if self.direct else 1


class SimulatedDisk:
    """See `dos.checkpoint.storage.Storage`; paths begin with "/", whose directory is there.

    Args:
        image: what the disk holds; None: nothing.
        capacity_bytes: of all files together; None: without end.
    """

    name = "simulated"

    def __init__(self, image: Image | None = None, capacity_bytes: int | None = None) -> None:
        self.durable = image or Image()
        self.volatile = self.durable.after(())
        self.pending: list[Change] = []
        self.capacity_bytes = capacity_bytes
        self._next_inode = 1 + max([*self.durable.files, *self.durable.directories])

    def open(
        self, path: str, *, write: bool, create: bool = False, direct: bool = True
    ) -> OpenFile:
        directory, name = self._parent(path)
        inode = self.volatile.directories[directory].get(name)
        if create and inode is not None:
            raise _error(errno.EEXIST, path)
        if create:
            inode = self._new_inode()
            self.volatile.files[inode] = self.durable.files[inode] = b""
            self._rename({(directory, name): inode})
        if inode is None:
            raise _error(errno.ENOENT, path)
        if inode not in self.volatile.files:
            raise _error(errno.EISDIR, path)
        return OpenFile(path, inode, write, direct)

    def close(self, file: OpenFile) -> None:
        assert not file.closed, f"{file.path} is closed twice"
        assert not file.in_flight, f"{file.path} is closed while {file.in_flight} are in flight"
        file.closed = True

    def preallocate(self, file: OpenFile, n_bytes: int) -> None:
        if self._free_bytes(file.inode) < n_bytes:
            # What there is stays reserved, as it does in a real one.
            self._resize(file, self._free_bytes(file.inode))
            raise _error(errno.ENOSPC, file.path)
        self._resize(file, n_bytes)

    def truncate(self, file: OpenFile, n_bytes: int) -> None:
        self._resize(file, n_bytes)

    def fsync(self, file: OpenFile) -> None:
        self._check(file)
        self._settle(lambda c: not isinstance(c, Rename) and c.inode == file.inode and not c.lost)

    def lose(self, file: OpenFile) -> None:
        """A sync of this file has failed: what was pending is never tried again."""
        for change in self.pending:
            if not isinstance(change, Rename) and change.inode == file.inode:
                change.lost = True

    def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> SimulatedQueue:
        return SimulatedQueue(self, depth)

    def rename(self, old: str, new: str) -> None:
        (old_at, inode), (new_at, replaced) = self._find(old), self._name(new)
        if replaced is not None and replaced in self.volatile.directories:
            if inode in self.volatile.files:
                raise _error(errno.EISDIR, new)
            if self.volatile.directories[replaced]:
                raise _error(errno.ENOTEMPTY, new)
        self._rename({old_at: None, new_at: inode})

    def exchange(self, a: str, b: str) -> None:
        (a_at, a_inode), (b_at, b_inode) = self._find(a), self._find(b)
        self._rename({a_at: b_inode, b_at: a_inode})

    def fsync_directory(self, path: str) -> None:
        directory = self._directory(path)
        for change in self.pending:
            if isinstance(change, Rename):
                change.unsynced.discard(directory)
        self._settle(lambda change: isinstance(change, Rename) and not change.unsynced)

    def unlink(self, path: str) -> None:
        at, inode = self._find(path)
        if inode in self.volatile.directories:
            raise _error(errno.EISDIR, path)
        self._rename({at: None})

    def mkdir(self, path: str) -> None:
        at, inode = self._name(path)
        if inode is not None:
            raise _error(errno.EEXIST, path)
        inode = self._new_inode()
        self.volatile.directories[inode], self.durable.directories[inode] = {}, {}
        self._rename({at: inode})

    def rmdir(self, path: str) -> None:
        at, _ = self._find(path)
        if self.volatile.directories[self._directory(path)]:
            raise _error(errno.ENOTEMPTY, path)
        self._rename({at: None})

    def listing(self, path: str) -> list[str]:
        return sorted(self.volatile.directories[self._directory(path)])

    def size(self, path: str) -> int:
        return len(self.read_bytes(path))

    def exists(self, path: str) -> bool:
        try:
            return not path.strip("/") or self._name(path)[1] is not None
        except OSError:
            return False

    def free_bytes(self, path: str) -> int:
        return self._free_bytes()

    def read_bytes(self, path: str) -> bytes:
        _, inode = self._find(path)
        if inode not in self.volatile.files:
            raise _error(errno.EISDIR, path)
        return self.volatile.files[inode]

    def write_bytes(self, path: str, data: bytes) -> None:
        file = self.open(path, write=True, create=not self.exists(path), direct=False)
        self._resize(file, 0)
        self.put(file, 0, data)

    def put(self, file: OpenFile, offset: int, data: bytes) -> None:
        """A write, done."""
        self._check(file)
        grown = offset + len(data) - len(self.volatile.files[file.inode])
        if grown > 0 and self._free_bytes() < grown:
            raise _error(errno.ENOSPC, file.path)
        self._change(Write(file.inode, offset, data))

    def _check(self, file: OpenFile) -> None:
        assert not file.closed, f"{file.path} is used after it was closed"
        assert file.write, f"{file.path} is open for reading only"

    def _resize(self, file: OpenFile, n_bytes: int) -> None:
        self._check(file)
        self._change(Resize(file.inode, n_bytes))

    def _rename(self, names: dict[tuple[int, str], int | None]) -> None:
        self._change(Rename(names, {directory for directory, _ in names}))

    def _change(self, change: Change) -> None:
        change.apply(self.volatile)
        self.pending.append(change)

    def _settle(self, is_durable: Any) -> None:
        settled = [change for change in self.pending if is_durable(change)]
        self.pending = [change for change in self.pending if not is_durable(change)]
        self.durable = self.durable.after(settled)

    def _free_bytes(self, but: int = -1) -> int:
        if self.capacity_bytes is None:
            return 1 << 62
        named = {i for names in self.volatile.directories.values() for i in names.values()}
        files = self.volatile.files.items()
        used = sum(len(content) for inode, content in files if inode in named and inode != but)
        return self.capacity_bytes - used

    def _new_inode(self) -> int:
        self._next_inode += 1
        return self._next_inode - 1

    def _directory(self, path: str) -> int:
        inode = ROOT_INODE
        for name in path.strip("/").split("/") if path.strip("/") else []:
            found = self.volatile.directories[inode].get(name)
            if found is None:
                raise _error(errno.ENOENT, path)
            if found not in self.volatile.directories:
                raise _error(errno.ENOTDIR, path)
            inode = found
        return inode

    def _parent(self, path: str) -> tuple[int, str]:
        above, name = os.path.split(path)
        return self._directory(above), name

    def _name(self, path: str) -> tuple[tuple[int, str], int | None]:
        directory, name = self._parent(path)
        return (directory, name), self.volatile.directories[directory].get(name)

    def _find(self, path: str) -> tuple[tuple[int, str], int]:
        at, inode = self._name(path)
        if inode is None:
            raise _error(errno.ENOENT, path)
        return at, inode


@dataclass
class _Request:
    write: bool
    file: OpenFile
    offset: int
    buffer: memoryview
    before: bytes  # what was in the buffer when it was begun


class SimulatedQueue:
    """See `dos.checkpoint.storage.Queue`; what is in flight happens when it is told."""

    def __init__(self, disk: SimulatedDisk, depth: int) -> None:
        self._disk, self._depth = disk, depth
        self._in_flight: dict[int, _Request] = {}
        self._done: list[tuple[int, OSError | None]] = []
        self._closed = False

    def write(self, file: OpenFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        self._begin(True, file, offset_bytes, buffer, token)

    def read(self, file: OpenFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        self._begin(False, file, offset_bytes, buffer, token)

    def completed(self, *, wait: bool) -> list[tuple[int, OSError | None]]:
        if wait and not self._done and self._in_flight:
            self._end(next(iter(self._in_flight)))
        done, self._done = self._done, []
        return done

    def drain(self) -> list[tuple[int, OSError | None]]:
        for token in list(self._in_flight):
            self._end(token)
        return self.completed(wait=False)

    def close(self) -> None:
        self.drain()
        self._closed = True

    def _begin(
        self, write: bool, file: OpenFile, offset: int, buffer: memoryview, token: int
    ) -> None:
        if self._closed:
            raise ValueError("the queue is closed")
        if token in self._in_flight or len(buffer) > 64 << 20:
            raise ValueError(f"token {token} is in flight, or its buffer too large")
        assert not file.closed, f"{file.path} is used after it was closed"
        while len(self._in_flight) >= self._depth:
            self._end(next(iter(self._in_flight)))
        self._in_flight[token] = _Request(write, file, offset, buffer, bytes(buffer))
        file.in_flight += 1

    def _end(self, token: int) -> None:
        request = self._in_flight.pop(token)
        request.file.in_flight -= 1
        error = None
        try:
            self._carry_out(request)
        except OSError as failed:
            error = failed
        self._done.append((token, error))

    def _carry_out(self, request: _Request) -> None:
        file, buffer = request.file, request.buffer
        assert bytes(buffer) == request.before, f"a buffer of {file.path} changed in flight"
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        if address % file.memory_align_bytes or request.offset % file.offset_align_bytes:
            raise _error(errno.EINVAL, file.path)
        if len(buffer) % file.offset_align_bytes:
            raise _error(errno.EINVAL, file.path)
        if request.write:
            self._disk.put(file, request.offset, request.before)
            return
        data = self._disk.volatile.files[file.inode][request.offset :][: len(buffer)]
        if len(buffer) - len(data) >= BLOCK_BYTES:
            raise _error(errno.ENODATA, file.path)
        buffer[: len(data)] = data


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
