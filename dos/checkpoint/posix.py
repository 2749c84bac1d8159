"""Files by the calls of `os` alone: the reference, and what the compiled engines build on."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dos.checkpoint.linux import BLOCK_BYTES, allocate, exchange, make_direct

# Calls in a row that move nothing before a transfer is given up, and the pause between them.
_ATTEMPTS = 1000
_PAUSE_S = 0.001

SMALL_FILE_BYTES = 64 << 20
"""What `read_bytes` takes: a manifest, or less."""

Completion = tuple[int, OSError | None]
"""A token, and why its read or write failed."""


@dataclass(frozen=True)
class PosixFile:
    """An open file; see `dos.checkpoint.storage.File`."""

    path: str
    fd: int
    direct: bool
    memory_align_bytes: int
    offset_align_bytes: int


class PosixFiles:
    """Every call to the file system but a queue; see `dos.checkpoint.storage.Storage`."""

    def open(
        self, path: str, *, write: bool, create: bool = False, direct: bool = True
    ) -> PosixFile:
        """See `Storage.open`."""
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
        try:
            aligns = make_direct(fd, write=write) if direct else None
        except BaseException:
            os.close(fd)
            if create:
                with suppress(OSError):
                    os.unlink(path)
            raise
        return PosixFile(path, fd, aligns is not None, *(aligns or (1, 1)))

    def close(self, file: PosixFile) -> None:
        """See `Storage.close`."""
        os.close(file.fd)

    def preallocate(self, file: PosixFile, n_bytes: int) -> None:
        """See `Storage.preallocate`."""
        if not allocate(file.fd, n_bytes, file.path):
            os.ftruncate(file.fd, n_bytes)

    def truncate(self, file: PosixFile, n_bytes: int) -> None:
        """See `Storage.truncate`."""
        os.ftruncate(file.fd, n_bytes)

    def fsync(self, file: PosixFile) -> None:
        """See `Storage.fsync`."""
        os.fsync(file.fd)

    def rename(self, old: str, new: str) -> None:
        """See `Storage.rename`."""
        os.rename(old, new)

    def exchange(self, a: str, b: str) -> None:
        """See `Storage.exchange`."""
        exchange(a, b)

    def fsync_directory(self, path: str) -> None:
        """See `Storage.fsync_directory`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: str) -> None:
        """See `Storage.unlink`."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """See `Storage.mkdir`."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """See `Storage.rmdir`."""
        os.rmdir(path)

    def listing(self, path: str) -> list[str]:
        """See `Storage.listing`."""
        return sorted(os.listdir(path))

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        return os.stat(path).st_size

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return os.path.lexists(path)

    def free_bytes(self, path: str) -> int:
        """See `Storage.free_bytes`."""
        told = os.statvfs(path)
        return told.f_bavail * told.f_frsize

    def read_bytes(self, path: str) -> bytes:
        """See `Storage.read_bytes`."""
        # Not blocking, because a pipe of that name could be waited for without end.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
                raise OSError(number, "it is no file", path)
            if status.st_size > SMALL_FILE_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            return file.read()

    def write_bytes(self, path: str, data: bytes) -> None:
        """See `Storage.write_bytes`."""
        with open(path, "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]


class PosixStorage(PosixFiles):
    """Reads and writes are done where they are asked for, one after the other."""

    name = "posix"

    def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> PosixQueue:
        """See `Storage.queue`."""
        return PosixQueue()


class PosixQueue:
    """Reads and writes at once, on the caller; see `dos.checkpoint.storage.Queue`."""

    def __init__(self) -> None:
        self._done: list[Completion] = []
        self._closed = False

    def write(self, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        """See `Queue.write`."""
        self._transfer(write_all, file, offset_bytes, buffer, token)

    def read(self, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        """See `Queue.read`."""
        self._transfer(read_all, file, offset_bytes, buffer, token)

    def completed(self, *, wait: bool) -> list[Completion]:
        """See `Queue.completed`."""
        done, self._done = self._done, []
        return done

    def drain(self) -> list[Completion]:
        """See `Queue.drain`."""
        return self.completed(wait=True)

    def close(self) -> None:
        """See `Queue.close`."""
        self._closed = True

    def _transfer(
        self,
        move: Callable[[PosixFile, int, memoryview], None],
        file: PosixFile,
        offset_bytes: int,
        buffer: memoryview,
        token: int,
    ) -> None:
        if self._closed:
            raise ValueError("the queue is closed")
        error = None
        try:
            move(file, offset_bytes, buffer.cast("B"))
        except OSError as failed:
            error = failed
        self._done.append((token, error))


def write_all(file: PosixFile, offset_bytes: int, buffer: memoryview) -> None:
    """Write all of a buffer; what a short write leaves is written from a block's start."""
    done = stalls = 0
    while done < len(buffer):
        moved = _moved(os.pwritev, file, offset_bytes + done, buffer[done:])
        if done + moved < len(buffer):
            moved -= moved % file.offset_align_bytes
        done += moved
        stalls = 0 if moved else stalls + 1
        if stalls == _ATTEMPTS:
            raise OSError(errno.EIO, "writing makes no progress", file.path)


def read_all(file: PosixFile, offset_bytes: int, buffer: memoryview) -> None:
    """Fill a buffer; less than `BLOCK_BYTES` of it may lie behind the end of the file."""
    done = 0
    while done < len(buffer):
        moved = _moved(os.preadv, file, offset_bytes + done, buffer[done:])
        done += moved
        # Only at the end of the file does a direct read stop inside a block.
        if moved == 0 or moved % file.offset_align_bytes:
            if len(buffer) - done < BLOCK_BYTES:
                return
            raise OSError(errno.ENODATA, "the file ends before what was to be read", file.path)


def _moved(
    call: Callable[[int, list[memoryview], int], int],
    file: PosixFile,
    offset_bytes: int,
    rest: memoryview,
) -> int:
    """Bytes moved by one call, which is repeated while the system says try again."""
    for _ in range(_ATTEMPTS):
        try:
            return call(file.fd, [rest], offset_bytes)
        except (InterruptedError, BlockingIOError):
            time.sleep(_PAUSE_S)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.path) from None
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), file.path)
