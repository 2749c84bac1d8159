"""The compiled engines: io_uring, and threads that call pread and pwrite."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import xxhash

from dos.checkpoint.posix import Completion, PosixFile, PosixFiles

Piece = tuple[int, int, int]
"""An offset in a buffer, an address of host memory, and a size in bytes."""

Chunk = tuple[memoryview, Sequence[Piece], int]
"""A buffer, the pieces that it is filled from, and the seed of its checksum.

A piece may be memory of the buffer's own, where it belongs.
"""

_warned: set[str] = set()
_warn_lock = threading.Lock()

_why_missing = ""
try:
    import dos.kernels._native as _native
except ImportError as missing:
    _why_missing = f"no compiled extension ({missing})"
    _native = None  # type: ignore[assignment]


def refusal(engine: str) -> str:
    """Why "io_uring" or "threads" cannot be used here; empty if it can."""
    if _native is None:
        return _why_missing
    return _native.io_uring_refusal() if engine == "io_uring" else ""


def warn_once(text: str) -> None:
    """A RuntimeWarning, the first time that there is cause for it."""
    with _warn_lock:
        first = text not in _warned
        _warned.add(text)
    if first:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def gather(target: memoryview, pieces: Sequence[Piece]) -> None:
    """Fill a buffer with what lies at addresses, and zeros between.

    By one call for a whole chunk, because every call has to wait for the GIL at its end, up to
    5 ms wherever another thread computes in Python.

    Args:
        target: the buffer.
        pieces: which bytes of it lie where; they ascend and do not overlap.

    Raises:
        ValueError: the pieces do not fit.
    """
    if _native is not None:
        _native.gather(target, pieces)
        return
    end = 0
    for offset, address, n_bytes in (*pieces, (len(target), 0, 0)):
        target[end:offset] = bytes(offset - end)
        target[offset : offset + n_bytes] = _bytes_at(address, n_bytes)
        end = offset + n_bytes


def fill(chunks: Sequence[Chunk]) -> list[bytes]:
    """Fill buffers as `gather` does, and take their checksums; all of them by one call.

    Raises:
        ValueError: the pieces of one do not fit, or it has less than 241 bytes.
    """
    if _native is not None:
        return _native.fill(chunks)
    for target, pieces, _ in chunks:
        gather(target, pieces)
    return [xxhash.xxh3_128_digest(target, seed) for target, _, seed in chunks]


def scatter(source: memoryview, pieces: Sequence[Piece]) -> None:
    """Copy parts of a buffer to addresses, by one call as `gather` does."""
    if _native is not None:
        _native.scatter(source, pieces)
        return
    for offset, address, n_bytes in pieces:
        _bytes_at(address, n_bytes)[:] = source[offset : offset + n_bytes]


def _bytes_at(address: int, n_bytes: int) -> memoryview:
    if not n_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * n_bytes).from_address(address)).cast("B")


class NativeStorage(PosixFiles):
    """The file system, its reads and writes in flight; see `dos.checkpoint.storage.Storage`."""

    def __init__(self, engine: Any) -> None:
        self.name: str = engine

    def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> NativeQueue:
        """See `Storage.queue`; by threads, and said once, where a ring is refused."""
        try:
            return NativeQueue(self.name, depth, registered)
        except OSError as error:
            warn_once(f"checkpoints go through the engine 'threads': io_uring: {error.strerror}")
            return NativeQueue("threads", depth, registered)


class NativeQueue:
    """Reads and writes in flight; see `dos.checkpoint.storage.Queue`."""

    def __init__(self, engine: Any, depth: int, registered: Sequence[memoryview]) -> None:
        self._queue = _native.IoQueue(engine, depth, registered)
        # What each token in flight is about: kept alive here as well.
        self._in_flight: dict[int, tuple[PosixFile, memoryview]] = {}

    @property
    def registered_bytes(self) -> int:
        """How much of the registered memory is prepared once instead of for each transfer."""
        return self._queue.registered_bytes

    def write(self, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        """See `Queue.write`."""
        self._submit(True, file, offset_bytes, buffer, token)

    def read(self, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        """See `Queue.read`."""
        self._submit(False, file, offset_bytes, buffer, token)

    def completed(self, *, wait: bool) -> list[Completion]:
        """See `Queue.completed`."""
        return [(token, self._error(token, code)) for token, code in self._queue.completed(wait)]

    def drain(self) -> list[Completion]:
        """See `Queue.drain`."""
        done: list[Completion] = []
        while self._in_flight:
            done += self.completed(wait=True)
        return done

    def close(self) -> None:
        """See `Queue.close`."""
        self._queue.close()
        self._in_flight.clear()

    def _submit(
        self, write: bool, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int
    ) -> None:
        if token in self._in_flight:
            raise ValueError(f"token {token} is in flight")
        # Before it begins: a signal's exception between the two lines must not free the buffer.
        self._in_flight[token] = file, buffer
        try:
            self._queue.submit(write, file.fd, offset_bytes, buffer, file.offset_align_bytes, token)
        except (ValueError, RuntimeError, OSError):
            del self._in_flight[token]
            raise

    def _error(self, token: int, code: int) -> OSError | None:
        file, _ = self._in_flight.pop(token)
        return OSError(code, os.strerror(code), file.path) if code else None
